"""The guides' names exist or are on the page of differences, whose rows name real tests."""

import ast
import inspect
import re

from harness import ROOT

import ddp_ref
import ddp_ref.initialize

PAGE = (ROOT / "docs" / "differences.md").read_text()


# What the guides call, with which parameters: after a *, by keyword. Other names and parameters
# stand on the page.
SIGNATURES = {
    ddp_ref: "initialize_ddp(timeout,*,rank,master_addr,master_port,backend) cleanup_ddp()"
    " on_rank(rank,*,barrier) parallelize_on_gpus(*,num_gpus,pass_device)"
    " parallel_on_all_devices(func) ParallelExecutor(*,num_gpus,pass_device)"
    " Handler(*,use_distributed) TrainerDDP(rank,config) get_loader() setup_logging(rank)",
    ddp_ref.initialize: "initialize_ddp(timeout) _should_use_distributed(use_distributed_flag)"
    " _is_env_distributed() _resolve_device(device) _initialize_distributed(timeout)"
    " _pick_device(local_rank) _first_host_from_slurm_nodelist(nodelist)",
    ddp_ref.ParallelExecutor: "run(func,args,kwargs)",
    ddp_ref.Handler: "set_train_loader(*,batch_size) set_val_loader(*,batch_size) save() load()"
    " sample() log_likelihood() predict() plot_losses() plot_metrics()",
    ddp_ref.TrainerDDP: "prepare_dataloaders() run_training(train_loader,val_loader)"
    " run_test(test_loader)",
}
OTHERS = (
    "`nn_handler.utils.ddp` `.ddp_init` `.ddp_decorators` `QuantumGrav.train_ddp` `NNHandler`"
    " `worldsize=` `self.handler._rank` `validator.report()` `save_checkpoint()`"
)


def test_the_guides_names_and_parameters_exist_here_or_are_on_the_page():
    for owner, signatures in SIGNATURES.items():
        for name, given in re.findall(r"(\w+)\(([\w,*]*)\)", signatures):
            own = [p for p in inspect.signature(getattr(owner, name)).parameters if p != "self"]
            positional, _, keywords = (part.strip(",") for part in given.partition("*"))
            first = positional.split(",") if positional else []
            assert own[: len(first)] == first, name
            assert set(keywords.split(",")) - {""} <= set(own), name
    assert ddp_ref.Handler.train_losses
    assert [name for name in OTHERS.split() if name not in PAGE] == []


# Each heading about problems in the TrainerDDP guide, and the heading of our page with the answer.
ANSWERS = {
    "Port Already in Use": "`Address already in use`, `EADDRINUSE`",
    "CUDA Out of Memory": "`CUDA out of memory`",
    "Only One GPU is Used": "Only one GPU is used",
    "Processes Not Synchronizing": "It hangs",
    "Data Not Distributed Properly": "The data are not distributed as they should be",
    "GPU Usage": "It is slow",
    "Log Output": "The screen stays empty",
    "Scaling Efficiency": "More ranks are hardly faster",
    "Optimization Tips": "The GPUs wait for data",
}


def test_every_heading_of_the_guide_is_answered():
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    for heading, answer in ANSWERS.items():
        assert re.search(rf"^##+ {re.escape(answer)}\n\n(?!#)", page, re.MULTILINE), heading


def test_every_row_names_tests_that_exist():
    rows = [line for line in PAGE.splitlines() if line.startswith("| ")]
    assert len([row for row in rows if "shown by" not in row]) >= 60
    for row in rows:
        *cells, last = [cell.strip() for cell in re.split(r"(?<!\\)\|", row)[1:-1]]
        if last == "shown by":
            columns = len(cells)
            continue
        assert len(cells) == columns and all(cells), f"an empty cell: {row}"
        names = re.findall(r"`(test_\w+)\.py::(\w+)`", last)
        assert len(names) == last.count("`") / 2 > 0, f"no test at the end of: {row}"
        for file, name in names:
            if name.startswith("check_"):  # the ranks of that test call it
                file = f"{file.removeprefix('test_')}_checks"
            assert name in functions_in(f"{file}.py"), row


def functions_in(file):
    """Return the names of the functions in a file of tests."""
    tree = ast.parse((ROOT / "tests" / file).read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
