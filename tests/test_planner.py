"""The page "Plan a run": its formulas, and the page in a browser."""

import inspect
import itertools
import re
from math import isclose

import pytest
from harness import ROOT
from lesson import cost_model, palette

pytestmark = pytest.mark.site
MODEL = ROOT / "docs" / "planner" / "model.js"
PAGE = ROOT / "docs" / "planner" / "page.js"
PRESETS = ["4 nodes at 400 Gb/s", "4 nodes at 25 Gb/s", "8 GPUs with NVLink", "2 CPU cores"]

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


def test_the_formulas_that_only_the_page_has(model):
    """The last bucket ends when the exposed seconds do, and buckets come one after another."""
    for all_reduce, backward in itertools.product([0.1, 1.0, 7.0], [0.5, 1.0]):
        call = f"number => costModel.bucket_span(number, {all_reduce}, {backward}, 6)"
        spans = [model.evaluate(call, number) for number in range(1, 7)]
        assert spans[-1][2] - backward == pytest.approx(
            cost_model.exposed_seconds(all_reduce, backward, 6)
        )
        assert [ready for ready, *_ in spans] == pytest.approx(
            [n * backward / 6 for n in range(1, 7)]
        )
        for (_, _, free), (ready, start, stop) in itertools.pairwise(spans):
            assert start == pytest.approx(max(ready, free))
            assert stop == pytest.approx(start + all_reduce / 6)
    even = model.evaluate("costModel.break_even_bandwidth(4e8, 8, 0.0164)")
    assert cost_model.all_reduce_seconds(4e8, 8, even) == pytest.approx(0.0164)


def test_the_colours_agree_with_the_palette():
    colours = dict(re.findall(r"(\w+): \"(#\w{6})\"", PAGE.read_text()))
    process = {n: getattr(palette, n.upper()) for n in ("compute", "communicate", "wait")}
    assert colours == process | palette.MEMORY


def test_the_page_works_from_a_file():
    """A browser does not load modules or fetch anything from a file:// URL."""
    text = MODEL.read_text() + PAGE.read_text()
    assert not re.search(r"^\s*(import|export)\b|fetch\(|type=.module", text, re.MULTILINE)


@pytest.fixture
def planner(site, browser):
    """Open the page on a narrow phone. During the test, nothing may appear in its console."""
    page = browser.new_page(viewport={"width": 360, "height": 740})
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


def assert_nothing_overflows(page):
    wide = page.evaluate(
        """() => {
          const limit = document.documentElement.clientWidth;
          const all = [...document.querySelectorAll("#planner, #planner *")];
          const right = (element) => element.getBoundingClientRect().right;
          return all.filter((e) => right(e) > limit).map((e) => e.outerHTML.slice(0, 80));
        }"""
    )
    assert wide == []
    assert page.evaluate("document.documentElement.scrollWidth") <= 360


def test_each_preset(planner):
    shown = {}
    for name in PRESETS:
        field(planner, "Start from").select_option(name)
        assert field(planner, "Start from").input_value() == name
        assert planner.locator(".timeline rect.bucket").count() >= 1
        assert_nothing_overflows(planner)
        shown[name] = fact(planner, "efficiency").split(",")[0], fact(planner, "ring")
    # 400 MB in 16 buckets, backward 16.4 ms, forward half of that.
    assert shown["4 nodes at 25 Gb/s"] == ("9.56 %", "3.13 GB/s: the link between nodes")
    assert shown["4 nodes at 400 Gb/s"] == ("96.2 %", "50 GB/s: the link between nodes")
    assert shown["8 GPUs with NVLink"] == ("99.6 %", "450 GB/s: the link within a node")
    assert "within a node" in shown["2 CPU cores"][1]


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
    assert "left out" in planner.locator("#planner").inner_text()
    field(planner, "Optimizer").select_option("SGD")
    assert row(planner, "DDP, bucket view")[0] == "56 GB"
    field(planner, "Activations per GPU (GB), if you know them").fill("10")
    assert row(planner, "FSDP2")[0] == "17 GB"
    assert "your own number, the same" in planner.locator("#planner").inner_text()
    field(planner, "Bucket size (MiB)").fill("1")  # thousands of buckets, drawn in groups
    assert 20 < planner.locator(".timeline rect.bucket").count() <= 60
    assert fact(planner, "reduce").endswith("26,703 buckets with 1.05 MB each")
    assert_nothing_overflows(planner)
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
    label = planner.locator(".timeline [role=img]").get_attribute("aria-label")
    assert label.endswith("Efficiency: 9.56 %.")


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
    other.evaluate("location.hash = 'nodes=2&gpus=1'")  # the rest comes from the first preset
    other.wait_for_function("document.querySelector('.says').textContent.startsWith('2 ranks')")
    assert field(other, "Precision").input_value() == "bf16 autocast"


def test_nonsense_is_refused(planner):
    step, nodes = fact(planner, "step"), field(planner, "Nodes")
    for nonsense in ["", "0", "-3", "2.5"]:
        nodes.fill(nonsense)
        assert nodes.get_attribute("aria-invalid") == "true"
        assert planner.get_by_role("status").inner_text().startswith("Nodes: ")
        assert planner.locator(".stale").count() == 1 and fact(planner, "step") == step
    nodes.fill("1")
    assert planner.locator(".stale").count() == 0 and fact(planner, "step") != step


def test_every_input_has_a_label_and_the_keyboard_reaches_it(planner):
    names = planner.locator("#planner input, #planner select").evaluate_all(
        "inputs => inputs.map(input => input.labels.length === 1 && input.labels[0].innerText)"
    )
    assert len(names) == 13 and all(names)
    field(planner, "Start from").focus()
    for _ in range(12):
        planner.keyboard.press("Tab")
    assert planner.evaluate("document.activeElement.id") == "plan-activations"


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
