/** Play the log of simulated ranks. ring_player.py decides what happens in each step.

    root: an empty element. data: the `colors` and the `steps`, the first of which is the start.
    css: the text of ring_player.css. */
function playRing(root, { colors, steps }, css) {
  const last = steps.length - 1, size = colors.ranks.length, SECONDS_PER_STEP = 2.5;
  const [WIDTH, HEIGHT] = [26, 40]; // of a chunk, in units of the picture
  const BULGE = 68; // how far an arrow's control point is from the straight line

  /** An HTML element, or an SVG element if the tag begins with "svg:". */
  const make = (tag, attributes = {}, ...children) => {
    const svg = "http://www.w3.org/2000/svg";
    const element = tag.startsWith("svg:")
      ? document.createElementNS(svg, tag.slice(4))
      : document.createElement(tag);
    for (const name in attributes) element.setAttribute(name, attributes[name]);
    element.append(...children);
    return element;
  };

  /** The middle of a rank's row of chunks: clockwise on an ellipse, with rank 0 at the top. */
  const center = (rank) => {
    const angle = (2 * Math.PI * rank) / size;
    return { x: 128 * Math.sin(angle), y: -112 * Math.cos(angle) };
  };

  /** A chunk with one stripe for each rank whose numbers are summed in it, rank 0's on top. */
  function drawChunk(rank, chunk, held, arrived) {
    const middle = center(rank), stripe = HEIGHT / size;
    const x = middle.x + (chunk - size / 2) * WIDTH, y = middle.y - HEIGHT / 2;
    const whose = new Intl.ListFormat("en-GB").format(held.map((other) => `rank ${other}`));
    const group = make("svg:g", { "data-rank": rank, "data-chunk": chunk },
      make("svg:title", {}, `Rank ${rank}, chunk ${chunk}: the numbers of ${whose}`));
    const box = (attributes) =>
      group.append(make("svg:rect", { x, y, width: WIDTH, height: HEIGHT, ...attributes }));
    for (const other of held)
      box({ y: y + other * stripe, height: stripe, fill: colors.ranks[other] });
    box({ class: "outline" });
    if (arrived) box({ class: "arrived", stroke: colors.communicate });
    group.append(make("svg:text", { x: x + WIDTH / 2, y: y + HEIGHT + 13 }, chunk));
    return group;
  }

  /** An arrow from rank to rank that bulges to its left, with the numbers of its chunks. */
  function drawArrow({ source, target, chunks }) {
    const a = center(source), b = center(target), distance = Math.hypot(b.x - a.x, b.y - a.y);
    const at = (t, aside = 0) => {
      const left = (2 * t * (1 - t) * BULGE + aside) / distance, dx = b.x - a.x, dy = b.y - a.y;
      return [a.x + t * dx + left * dy, a.y + t * dy - left * dx];
    };
    const covers = (row, [x, y]) => // the row, with the texts above and below it
      Math.abs(x - row.x) < (size * WIDTH) / 2 + 6 && Math.abs(y - row.y) < 42;
    const times = [...Array(101).keys()].map((percent) => percent / 100)
      .filter((t) => !covers(a, at(t)) && !covers(b, at(t)));
    const first = times[0], end = times.at(-1), tip = at(end), before = at(end - 0.04);
    const angle = (Math.atan2(tip[1] - before[1], tip[0] - before[0]) * 180) / Math.PI;
    const [x, y] = at((first + end) / 2, -12 - 5 * (chunks.length - 1));
    const head = { d: "M2 0L-9 5V-5Z", transform: `translate(${tip}) rotate(${angle})` };
    return make("svg:g", { class: "arrow", "data-source": source, "data-target": target },
      make("svg:path", { d: `M${times.map((t) => at(t)).join("L")}`, stroke: colors.communicate }),
      make("svg:path", { ...head, fill: colors.communicate }),
      make("svg:text", { x, y: y + 5 }, chunks.join(" ")));
  }

  function draw({ messages, holdings }) {
    const arrows = {}, arrived = new Set();
    for (const { source, target, chunk } of messages) {
      (arrows[[source, target]] ??= { source, target, chunks: [] }).chunks.push(chunk);
      arrived.add(`${target} ${chunk}`);
    }
    const rows = holdings.flatMap((row, rank) => [
      make("svg:text", { x: center(rank).x, y: center(rank).y - HEIGHT / 2 - 7 }, `rank ${rank}`),
      ...row.map((held, chunk) => drawChunk(rank, chunk, held, arrived.has(`${rank} ${chunk}`))),
    ]);
    picture.replaceChildren(...rows, ...Object.values(arrows).map(drawArrow));
    const titles = [...picture.querySelectorAll("title")].map((title) => title.textContent);
    picture.setAttribute("aria-label", `${titles.join(". ")}.`);
  }

  let step, timer = null;
  function show(wanted) {
    step = Math.min(Math.max(wanted, 0), last);
    draw(steps[step]);
    says.replaceChildren(...steps[step].text.map((paragraph) => make("p", {}, paragraph)));
    where.textContent = `step ${step} of ${last}`;
    hint.textContent = "Point at a chunk, or tap it, to see whose numbers it holds.";
    back.setAttribute("aria-disabled", step === 0); // `disabled` would take the focus away
    next.setAttribute("aria-disabled", step === last);
  }
  function pause() {
    clearInterval(timer);
    timer = null;
    play.textContent = "Play";
  }
  function playOrPause() {
    if (timer !== null) return pause();
    if (step === last) show(0);
    play.textContent = "Pause";
    timer = setInterval(() => {
      show(step + 1);
      if (step === last || !root.isConnected) pause();
    }, 1000 * SECONDS_PER_STEP);
  }
  const go = (steps) => [pause(), show(step + steps)];

  const button = (text, label, onClick) => {
    const element = make("button", { type: "button", "aria-label": label }, text);
    element.addEventListener("click", onClick);
    return element;
  };
  const back = button("Back", "Back one step", () => go(-1));
  const next = button("Next", "Next step", () => go(1));
  const play = button("Play", "Play or pause all steps", playOrPause);
  const where = make("span"), says = make("div", { "aria-live": "polite" });
  const hint = make("p", { class: "hint" });
  const picture = make("svg:svg", { viewBox: "-188 -166 376 326", role: "img" });
  const key = (text, style) => make("span", {}, make("i", { style }), text);
  const legend = make("p", { class: "legend" },
    ...colors.ranks.map((color, rank) => key(`numbers of rank ${rank}`, `background:${color}`)),
    key("just arrived", `border:3px solid ${colors.communicate}`));
  root.append(make("style", {}, css), picture, make("div", { class: "side" },
    make("div", { class: "controls" }, back, next, play, where), says, hint, legend));

  for (const event of ["click", "pointerover"])
    picture.addEventListener(event, ({ target }) => {
      const title = target.closest("[data-chunk]")?.querySelector("title");
      if (title) hint.textContent = title.textContent;
    });
  root.addEventListener("keydown", (event) => {
    const steps = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!steps || event.altKey || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    go(steps);
  });
  root.dataset.lmSuppressShortcuts = "true"; // JupyterLab's own shortcuts use the arrow keys too
  root.tabIndex = -1; // so that the keys work after a click on the picture
  show(0);
}
