/** The page "Plan a run": inputs, outputs and a picture. The formulas are in model.js. */
(() => {
  const M = costModel;
  /** The colours of notebooks/lesson/palette.py. */
  const COLORS = {
    compute: "#56B4E9", communicate: "#D55E00", wait: "#BFBFBF",
    weights: "#332288", gradients: "#88CCEE", buckets: "#44AA99", optimizer: "#DDCC77",
    activations: "#AA4499",
  };
  const MEMORY = ["weights", "gradients", "buckets", "optimizer", "activations"];
  const OPTIONAL = { type: "number", step: "any" }, NUMBER = { ...OPTIONAL, required: "" };

  /** The inputs by their name in the address: the label, and the attributes or the choices. */
  const FIELDS = {
    parameters: ["Parameters (millions)", { ...NUMBER, min: 0.001, max: 1e8 }],
    precision: ["Precision", Object.keys(M.PRECISIONS)],
    optimizer: ["Optimizer", Object.keys(M.OPTIMIZERS)],
    gpus: ["GPUs per node", { ...NUMBER, min: 1, max: 1e5, step: 1 }],
    nodes: ["Nodes", { ...NUMBER, min: 1, max: 1e5, step: 1 }],
    within: ["Bandwidth within a node, per GPU (GB/s)", { ...NUMBER, min: 0.001, max: 1e6 }],
    between: ["Bandwidth between nodes, per node (Gb/s)", { ...NUMBER, min: 0.001, max: 1e6 }],
    latency: ["Latency of an all-reduce (µs)", { ...NUMBER, min: 0, max: 1e7 }],
    forward: ["Forward and optimizer step (ms)", { ...NUMBER, min: 0, max: 1e7 }],
    backward: ["Backward (ms)", { ...NUMBER, min: 0.001, max: 1e7 }],
    bucket: ["Bucket size (MiB)", { ...NUMBER, min: 0.001, max: 1e6 }],
    activations: ["Activations per GPU (GB), if you know them", { ...OPTIONAL, min: 0, max: 1e6 }],
  };

  /** 100 million parameters and 16,384 tokens per rank: the worked example of the page. */
  const EXAMPLE = {
    parameters: 100, precision: "bf16 autocast", optimizer: "Adam", gpus: 8, nodes: 4,
    within: 450, between: 400, latency: 0, forward: 8.2, backward: 16.4, bucket: 25,
    activations: "",
  };
  const PRESETS = {
    "4 nodes at 400 Gb/s": EXAMPLE,
    "4 nodes at 25 Gb/s": { ...EXAMPLE, between: 25 },
    "8 GPUs with NVLink": { ...EXAMPLE, nodes: 1 },
    "2 CPU cores": {
      ...EXAMPLE, parameters: 1.57, precision: "fp32", optimizer: "SGD", gpus: 2, nodes: 1,
      within: 4, latency: 110, forward: 2.8, backward: 4,
    },
  };
  const OWN = "your own numbers";

  /** An HTML element, or an SVG element if the tag begins with "svg:". */
  const make = (tag, attributes = {}, ...children) => {
    const svg = tag.startsWith("svg:") && "http://www.w3.org/2000/svg";
    const element = svg
      ? document.createElementNS(svg, tag.slice(4))
      : document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    element.append(...children);
    return element;
  };

  /** Three significant digits, in a unit that suits the size. */
  const show = (value) =>
    Number(value.toPrecision(3)).toLocaleString("en-US", { maximumSignificantDigits: 3 });
  const withUnit = (value, ...units) => {
    const [size, unit] = units.find(([size]) => value >= size) ?? units.at(-1);
    return `${show(value / size)} ${unit}`;
  };
  const time = (value) => withUnit(value, [1, "s"], [1e-3, "ms"], [1e-6, "µs"]);
  const bytes = (value) => withUnit(value, [1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "kB"]);

  const inputs = {};
  const values = () =>
    Object.fromEntries(Object.entries(inputs).map(([name, input]) => [name, input.value]));

  /** The numbers of the form, in bytes and seconds, and what the formulas make of them. */
  function predict() {
    const v = values();
    const precision = M.PRECISIONS[v.precision], state = M.OPTIMIZERS[v.optimizer];
    const parameters = v.parameters * 1e6, gpus = Number(v.gpus), nodes = Number(v.nodes);
    const ranks = gpus * nodes, backward = v.backward / 1e3, forward = v.forward / 1e3;
    const payload = M.gradient_bytes(parameters, precision.reduced);
    const within = v.within * 1e9, between = M.bytes_per_second(v.between);
    const bandwidth = M.ring_bandwidth(gpus, nodes, within, between);
    const step = M.predict_step(
      forward, backward, payload, v.bucket * 2 ** 20, ranks, bandwidth, v.latency / 1e6);
    const strategies = M.STRATEGIES.map((name) => {
      const each = M.bytes_per_parameter(name, ranks, precision.weights, state);
      const memory = { activations: v.activations * 1e9 };
      for (const kind in each) memory[kind] = each[kind] * parameters;
      const total = MEMORY.reduce((sum, kind) => sum + memory[kind], 0);
      const sent = M.strategy_bytes_sent(name, parameters, ranks, precision);
      return { name, each, memory, total, sent };
    });
    const link = nodes > 1 && bandwidth === between ? "between nodes" : "within a node";
    const breakEven = M.break_even_bandwidth(payload, ranks, backward);
    return { ranks, forward, backward, bandwidth, link, payload, breakEven, step, strategies, v };
  }

  function summary({ ranks, step, forward, backward }) {
    const text = ranks === 1 ? "1 rank" : `${ranks.toLocaleString("en-US")} ranks`;
    return `${text}: a step of DDP takes ${time(step.seconds)}. Computing takes ` +
      `${time(forward + backward)}, and ${time(step.exposed)} of all-reduce are exposed: they come ` +
      `after backward. Efficiency: ${show(100 * step.efficiency)} %.`;
  }

  function facts({ ranks, bandwidth, link, payload, breakEven, step }) {
    return {
      efficiency: ["Efficiency", `${show(100 * step.efficiency)} %, as fast as ` +
        `${show(ranks * step.efficiency)} GPUs that never wait`],
      step: ["Time of a step", time(step.seconds)],
      exposed: ["Exposed all-reduce", time(step.exposed)],
      reduce: ["All-reduce", `${time(step.all_reduce)}, ` + (step.buckets === 1
        ? `1 bucket with ${bytes(payload)}`
        : `${step.buckets.toLocaleString("en-US")} buckets with ${bytes(payload / step.buckets)} each`)],
      ring: ["Bandwidth of the ring", `${bytes(bandwidth)}/s: the link ${link}`],
      even: ["Break-even bandwidth", `${bytes(breakEven)}/s, which is ` +
        `${show((breakEven * 8) / 1e9)} Gb/s`],
    };
  }

  /** One step: computing above, the all-reduce of each bucket below, what is exposed in gray. */
  function timeline(plan, width) {
    const { forward, backward, step } = plan;
    const at = (t) => (t / step.seconds) * width;
    const picture = make("svg:svg", {
      viewBox: `0 0 ${width} 138`, width, height: 138, role: "img", "aria-label": summary(plan),
    });
    const bar = (name, from, to, y, fill, label = "") => {
      const x = at(from), size = Math.max(at(to) - x, 1);
      const box = { x, y, width: size, height: 26, fill, class: name };
      picture.append(make("svg:rect", box));
      if (label.length * 7.5 < size)
        picture.append(make("svg:text", { x: x + size / 2, y: y + 17, class: "inside" }, label));
    };
    const text = (x, y, anchor, label) =>
      picture.append(make("svg:text", { x, y, "text-anchor": anchor }, label));
    const end = forward + backward;
    text(0, 12, "start", "a rank");
    bar("compute", 0, forward, 18, COLORS.compute, "forward");
    bar("compute", forward, end, 18, COLORS.compute, "backward");
    bar("wait", end, step.seconds, 18, COLORS.wait, "waits");
    text(0, 64, "start", "the network");
    const group = Math.ceil(step.buckets / 60); // more bars than that could not be told apart
    for (let last = step.buckets; last > 0; last -= group) {
      const count = Math.min(group, last);
      const [, start, stop] = M.bucket_span(last, step.all_reduce, backward, step.buckets);
      const from = start - (count - 1) * (stop - start);
      bar("bucket", forward + from, forward + stop, 70, COLORS.communicate);
    }
    const x = at(end);
    picture.append(make("svg:path", { d: `M${x} 16V48M${x} 68V104` }));
    text(0, 130, "start", "0");
    text(width, 130, "end", time(step.seconds));
    const anchor = x > width / 2 ? "end" : "start";
    text(x, 114, anchor, `exposed: ${time(step.exposed)}`);
    return picture;
  }

  /** The table of the strategies: memory with a bar, and the bytes sent. */
  function table({ strategies, v }) {
    const largest = Math.max(...strategies.map(({ total }) => total));
    const rows = strategies.map(({ name, each, memory, total, sent }) => {
      const stack = make("div", { class: "stack", "aria-hidden": "true" });
      for (const kind of MEMORY) {
        const width = `${(100 * memory[kind]) / largest}%`;
        if (memory[kind])
          stack.append(make("span", { style: `width:${width};background:${COLORS[kind]}` }));
      }
      const parts = MEMORY.slice(0, 4).map((kind) => show(each[kind])).join(" + ");
      const all = Object.values(each).reduce((sum, value) => sum + value, 0);
      return make("tr", { "data-strategy": name },
        make("th", { scope: "row" }, name),
        make("td", {}, bytes(total), stack, make("small", {}, `${parts} = ${show(all)}`)),
        make("td", {}, bytes(sent)));
    });
    const head = ["Strategy", "Memory per GPU", "Sent per step"];
    const cells = head.map((label) => make("th", { scope: "col" }, label));
    const legend = MEMORY.filter((kind) => kind !== "activations" || v.activations > 0)
      .map((kind) => make("span", {}, make("i", { style: `background:${COLORS[kind]}` }), kind));
    const note = v.activations > 0
      ? "Activations: your own number, the same for every strategy."
      : "Activations are left out. Measure them, and add your own number above.";
    return [
      make("table", {}, make("thead", {}, make("tr", {}, ...cells)), make("tbody", {}, ...rows)),
      make("p", { class: "legend" }, ...legend),
      make("p", {}, "The small numbers are bytes per parameter: weights + gradients + DDP's " +
        `buckets + optimizer state. ${note} Each rank sends the bytes on the right.`),
    ];
  }

  // The page: the form on top, and what it predicts below.
  const preset = make("select", { id: "plan-preset", name: "preset" });
  preset.append(...[...Object.keys(PRESETS), OWN].map((name) => make("option", {}, name)));
  const labelled = (label, input) =>
    make("div", {}, make("label", { for: input.id }, label), input);
  const form = make("form", { "aria-label": "Your run" }, labelled("Start from", preset));
  for (const [name, [label, kind]] of Object.entries(FIELDS)) {
    const attributes = { id: `plan-${name}`, name };
    inputs[name] = Array.isArray(kind)
      ? make("select", { ...attributes, required: "" }, ...kind.map((o) => make("option", {}, o)))
      : make("input", { ...attributes, ...kind });
    form.append(labelled(label, inputs[name]));
  }
  const says = make("p", { class: "says", role: "status" });
  const list = make("dl"), drawing = make("div", { class: "timeline" }), memory = make("div");
  const results = make("div", {}, list, make("h3", {}, "One step of DDP"), drawing,
    make("h3", {}, "Memory and traffic"), memory);
  document.getElementById("planner").replaceChildren(form, says, results);

  function update() {
    const own = (settings) => Object.entries(settings).some(([k, x]) => inputs[k].value !== `${x}`);
    preset.value = Object.keys(PRESETS).find((name) => !own(PRESETS[name])) ?? OWN;
    const wrong = Object.entries(inputs).filter(([, input]) => !input.checkValidity());
    for (const input of Object.values(inputs))
      input.setAttribute("aria-invalid", String(!input.checkValidity()));
    results.classList.toggle("stale", wrong.length > 0);
    if (wrong.length > 0) {
      const [name, input] = wrong[0];
      says.textContent = `${FIELDS[name][0]}: ${input.validationMessage}`;
      return;
    }
    const plan = predict();
    says.textContent = summary(plan);
    list.replaceChildren(...Object.entries(facts(plan)).flatMap(([name, [label, value]]) =>
      [make("dt", {}, label), make("dd", { "data-fact": name }, value)]));
    drawing.replaceChildren(timeline(plan, Math.max(drawing.clientWidth, 200)));
    memory.replaceChildren(...table(plan));
  }

  /** Fill the form with the settings; what they leave out comes from the first preset. */
  function fill(settings) {
    for (const name in FIELDS) inputs[name].value = settings[name] ?? EXAMPLE[name];
    update();
  }

  /** Keep the plan in the address, without a new entry in the browser's history. */
  function share() {
    update();
    history.replaceState(null, "", `#${new URLSearchParams(values())}`);
  }

  const fromAddress = () => fill(Object.fromEntries(new URLSearchParams(location.hash.slice(1))));
  preset.addEventListener("input", () => {
    if (preset.value in PRESETS) fill(PRESETS[preset.value]);
    share();
  });
  form.addEventListener("input", (event) => event.target !== preset && share());
  form.addEventListener("submit", (event) => event.preventDefault());
  window.addEventListener("hashchange", fromAddress);
  window.addEventListener("resize", update);
  fromAddress();
})();
