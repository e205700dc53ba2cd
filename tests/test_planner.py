"""The page "Plan a run": its formulas, and the page in a browser."""

import inspect
import itertools
import re
from math import isclose

import pytest
from harness import ROOT
from lesson import cost_model

pytestmark = pytest.mark.site
MODEL = ROOT / "docs" / "planner" / "model.js"
# Of each preset: the efficiency and the ring. 400 MB in 16 buckets, backward takes 16.4 ms, forward
# half of that.
PRESETS = {
    "4 nodes at 400 Gb/s": ("96.2 %", "50 GB/s: the link between nodes"),
    "4 nodes at 25 Gb/s": ("9.56 %", "3.13 GB/s: the link between nodes"),
    "8 GPUs with NVLink": ("99.6 %", "450 GB/s: the link within a node"),
}

WORLDS, PAYLOADS, SECONDS = [1, 2, 3, 8, 1000], [1.0, 6.3e6, 4e8, 2.8e11], [1e-4, 0.0164, 7.0]
BANDWIDTHS, LATENCIES, BUCKETS = [3.125e9, 4.5e11], [0.0, 2e-4], [1, 6, 16, 10_000]
LINK = [WORLDS, BANDWIDTHS, LATENCIES]
GRID = {  # the values of each argument
    "bytes_per_second": [[1, 25, 400.5]],
    "gradient_bytes": [PAYLOADS, [2, 4]],
    "ring_steps": [WORLDS],
    "bytes_sent": [PAYLOADS, WORLDS],
    "all_reduce_seconds": [PAYLOADS, *LINK],
    "bucket_count": [[0, *PAYLOADS], [1.0, 2**20, 25 * 2**20]],
    "bucketed_all_reduce_seconds": [PAYLOADS, BUCKETS, *LINK],
    "exposed_seconds": [SECONDS, SECONDS, BUCKETS],
    "efficiency": [SECONDS, [0.0, *SECONDS]],
    "predict_step": [[0.0, 0.0082], SECONDS, PAYLOADS, [2**20, 25 * 2**20], *LINK],
    "bytes_per_parameter": [cost_model.STRATEGIES, WORLDS, [2, 4], [0, 1, 2]],
    "strategy_bytes_sent": [
        cost_model.STRATEGIES, PAYLOADS, WORLDS, [*cost_model.PRECISIONS.values()]
    ],
}  # fmt: skip


def as_json(value):
    """Return a result or an argument as JavaScript represents it."""
    if hasattr(value, "_asdict"):
        return value._asdict()
    return list(value) if isinstance(value, tuple) else value


def same(left, right):
    """Return whether two results agree, to a relative 1e-9."""
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[k], right[k]) for k in left)
    if isinstance(left, list):
        return len(left) == len(right) and all(map(same, left, right))
    return left == right if isinstance(left, str) else isclose(left, right, rel_tol=1e-9)


@pytest.fixture
def model(browser):
    """Return a browser page with only the formulas."""
    page = browser.new_page()
    page.add_script_tag(path=MODEL)
    return page


def test_each_formula_agrees_with_python(model):
    choices = {
        "PRECISIONS": {name: as_json(value) for name, value in cost_model.PRECISIONS.items()},
        "STRATEGIES": list(cost_model.STRATEGIES),
    }
    others = {"OPTIMIZERS", "ring_bandwidth", "bucket_span", "break_even_bandwidth"}
    assert set(model.evaluate("Object.keys(costModel)")) == {*GRID, *choices, *others}
    for name, choice in choices.items():
        assert model.evaluate(f"costModel.{name}") == choice
    for name, values in GRID.items():
        function, cases = getattr(cost_model, name), list(itertools.product(*values))
        assert len(values) == len(inspect.signature(function).parameters)
        call = f"cases => cases.map(arguments => costModel.{name}(...arguments))"
        results = model.evaluate(call, [[as_json(value) for value in case] for case in cases])
        expected = [as_json(function(*case)) for case in cases]
        pairs = zip(cases, expected, results, strict=True)
        assert [pair for pair in pairs if not same(*pair[1:])] == [], name
    even = model.evaluate("costModel.break_even_bandwidth(4e8, 8, 0.0164)")
    assert cost_model.all_reduce_seconds(4e8, 8, even) == pytest.approx(0.0164)


@pytest.fixture
def planner(site, browser):
    """Open the page. During the test, nothing may appear in its console."""
    page = browser.new_page()
    messages = []
    page.on("console", lambda message: messages.append(message.text))
    page.on("pageerror", lambda error: messages.append(str(error)))
    page.goto(f"{site[1]}/docs/plan.html")
    yield page
    assert messages == []


def field(page, label):
    return page.get_by_label(label, exact=True)


def fact(page, name):
    return page.locator(f"[data-fact={name}]").inner_text()


def row(page, strategy):
    """Return a strategy's memory and bytes sent, as shown."""
    cells = page.locator(f"tr[data-strategy='{strategy}'] td")
    return cells.nth(0).inner_text().split("\n")[0], cells.nth(1).inner_text()


def test_each_preset(planner):
    for name, (efficiency, ring) in PRESETS.items():
        field(planner, "Start from").select_option(name)
        assert fact(planner, "efficiency").split(",")[0] == efficiency
        assert fact(planner, "ring") == ring


def test_inputs_change_the_outputs(planner):
    field(planner, "Start from").select_option("8 GPUs with NVLink")
    field(planner, "Parameters (millions)").fill("7000")
    assert field(planner, "Start from").input_value() == "your own numbers"
    field(planner, "Precision").select_option("fp32")
    # Chapter 10: 16 bytes per weight, 20 with DDP's own buckets; ZeRO-1 sends half as much again.
    assert row(planner, "DDP") == ("140 GB", "49 GB")
    assert row(planner, "DDP, bucket view") == ("112 GB", "49 GB")
    assert row(planner, "ZeRO-1") == ("63 GB", "73.5 GB")
    assert row(planner, "ZeRO-2") == ("38.5 GB", "49 GB")
    assert row(planner, "FSDP2") == ("14 GB", "73.5 GB")
    field(planner, "Optimizer").select_option("SGD")
    assert row(planner, "DDP, bucket view")[0] == "56 GB"
    field(planner, "Activations per GPU (GB), if you know them").fill("10")
    assert row(planner, "FSDP2")[0] == "17 GB"
    field(planner, "Bucket size (MiB)").fill("1")  # thousands of buckets, drawn in groups
    assert 20 < planner.locator(".timeline rect.bucket").count() <= 60
    assert fact(planner, "reduce").endswith("26,703 buckets with 1.05 MB each")
    field(planner, "GPUs per node").fill("1")
    assert row(planner, "DDP")[1] == "0 kB"


def test_the_timeline_shows_what_stays_exposed(planner):
    """The orange bars end where the step ends, and the gray bar is the time after backward."""
    field(planner, "Start from").select_option("4 nodes at 25 Gb/s")
    boxes = "bars => bars.map(bar => bar.getBBox()).map(box => [box.x, box.x + box.width])"
    buckets = planner.locator("rect.bucket").evaluate_all(boxes)
    (waits,) = planner.locator("rect.wait").evaluate_all(boxes)
    compute = planner.locator("rect.compute").evaluate_all(boxes)
    end = compute[-1][1]
    assert len(buckets) == 16 and len(compute) == 2
    # The network is slower than backward: it starts with the first bucket, and never pauses.
    ready = compute[1][0] + (end - compute[1][0]) / 16
    buckets.sort()
    assert buckets[0][0] == pytest.approx(ready, abs=0.5)
    assert all(b[1] == pytest.approx(c[0], abs=0.5) for b, c in itertools.pairwise(buckets))
    assert max(stop for _, stop in buckets) == pytest.approx(waits[1], abs=0.5)
    assert waits[0] == pytest.approx(end, abs=0.5)
    assert (waits[1] - waits[0]) / waits[1] == pytest.approx(1 - 0.0956, abs=0.001)


def test_a_plan_is_in_the_address(planner, browser):
    field(planner, "Nodes").fill("16")
    field(planner, "Precision").select_option("all bf16")
    step = fact(planner, "step")
    assert "nodes=16&" in planner.url
    other = browser.new_page()
    other.goto(planner.url)
    assert field(other, "Nodes").input_value() == "16"
    assert field(other, "Precision").input_value() == "all bf16"
    assert fact(other, "step") == step


def test_nonsense_is_refused(planner):
    step, nodes = fact(planner, "step"), field(planner, "Nodes")
    for nonsense in ["", "0", "-3", "2.5"]:
        nodes.fill(nonsense)
        assert nodes.get_attribute("aria-invalid") == "true"
        assert planner.get_by_role("status").inner_text().startswith("Nodes: ")
        assert planner.locator(".stale").count() == 1 and fact(planner, "step") == step
    nodes.fill("1")
    assert planner.locator(".stale").count() == 0 and fact(planner, "step") != step


def test_the_page_states_the_prediction_of_its_preset(planner):
    text = (ROOT / "docs" / "plan.md").read_text()
    rows = re.findall(r"\| (\d+) MiB \| (\d) \| ([\d.]+) ms \| ([\d.]+) ms \| (-\d+) % \|", text)
    assert len(rows) == 2
    field(planner, "Start from").select_option("2 CPU cores")
    for mib, buckets, predicted, measured, error in rows:
        field(planner, "Bucket size (MiB)").fill(mib)
        assert f", {buckets} bucket" in fact(planner, "reduce")
        shown = float(fact(planner, "step").removesuffix(" ms"))
        assert shown == pytest.approx(float(predicted), rel=0.03)  # its inputs are rounded
        assert round(100 * (float(predicted) / float(measured) - 1)) == int(error)
