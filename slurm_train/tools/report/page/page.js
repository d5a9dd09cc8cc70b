// Makes the page of a report from its facts: tables, sentences, sections, tiles. It follows figures.js in the same function.
const fold = (text) => text.length <= 120 ? text
  : make("details", { class: "fold" }, make("summary", {}, text.slice(0, 100) + " ..."), make("div", { class: "full" }, text));

// A column is its heading, its kind and what it reads from a row. Rows are sorted by what is read.
const texts = { number, time: moment, duration, bytes: byteSize, share, hours: (value) => isNumber(value) ? hours(value) : "-" };
const styles = { number: "num", duration: "num", bytes: "num", share: "num", hours: "num", chip: null };
const moods = { finished: "good", running: "busy", queued: "busy", requeued: "busy", finishing: "busy", "not started": "calm", stopped: "calm", completed: "calm" };
const chip = (text, mood = moods[text] || "bad") => make("span", { class: "chip " + mood }, text);
const cell = (kind, value, row) => {
  if (kind === "chip") return chip(plain(value), "is_calm" in row ? row.is_calm ? "calm" : "bad" : undefined);
  if (kind === "cause") return [make("i", { class: "swatch " + row.cause, style: { backgroundColor: `var(--${row.cause})` } }), value];
  if (kind === "code") return make("code", {}, setting(value));
  const text = kind in texts ? texts[kind] : (one) => isNumber(one) ? number(one) : one === null || one === undefined ? "" : setting(one);
  return fold(text(value));
};
const drawTable = (name, columns, rows, { summary = "", sortable = false, search = false, isMarked = () => false } = {}) => {
  const style = ([, kind]) => kind in styles ? styles[kind] : kind || null;
  // What is missing comes last, whichever way round; numbers come before texts.
  const compare = (one, other, way) => {
    const [isMissing, isOtherMissing] = [one, other].map((value) => value === null || value === undefined || value === "");
    if (isMissing || isOtherMissing) return isMissing - isOtherMissing;
    if (typeof one !== typeof other) return isNumber(one) ? -1 : 1;
    return way * (one < other ? -1 : one > other ? 1 : 0);
  };
  const drawn = rows.map((row) => {
    const run = row.given ? row.index : null;
    const one = make("tr", { class: isMarked(row) ? "marked" : null, "data-run": run },
      columns.map((column) => make("td", { class: style(column) }, cell(column[1], column[2](row), row))));
    if (run !== null) one.addEventListener("pointerenter", () => light(run));
    if (run !== null) one.addEventListener("pointerleave", () => light(null));
    return one;
  });
  const body = make("tbody", {}, drawn);
  const heads = columns.map((column) => make("th", { scope: "col", class: style(column) }, sortable ? make("button", { type: "button" }, column[0]) : column[0]));
  if (sortable) heads.forEach((head, place) => head.addEventListener("click", () => {
    const way = head.getAttribute("aria-sort") === "ascending" ? -1 : 1, read = columns[place][2];
    heads.forEach((one) => one.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort", way > 0 ? "ascending" : "descending");
    const order = rows.map((_, index) => index).sort((one, other) => compare(read(rows[one]), read(rows[other]), way) || one - other);
    body.append(...order.map((index) => drawn[index]));
  }));
  const found = make("div", { class: "scroll" }, make("table", { class: name }, make("thead", {}, make("tr", {}, heads)), body));
  if (summary) return make("details", {}, make("summary", {}, summary), found);
  if (!search) return found;
  const find = make("input", { type: "search", id: "find", placeholder: "rows with ...", "aria-label": "rows with" });
  find.addEventListener("input", choose);
  return make("div", {}, find, found);
};
const field = (name, kind = "", heading = plain(name)) => [heading, kind, (row) => row[name]];

const drawFolded = (summary, text, isDiff = false) => {
  const kind = (line) => /^(\+\+\+|---|diff |@@|index )/.test(line) ? "head" : { "+": "added", "-": "removed" }[line[0]] || null;
  const lines = isDiff ? text.split("\n").map((line) => make("span", { class: kind(line) }, line + "\n")) : text;
  return make("details", { class: isDiff ? "difference" : null }, make("summary", {}, summary), make("pre", {}, lines));
};

// What the sections show.
const drawRanks = ({ attempt, num_attempts: numAttempts, ranks }) => {
  const most = 128, heads = ["5 %", "median", "95 %", "99 %", "longest"];
  const times = (name, prefix) => heads.map((head, place) => [prefix + head, "duration", (row) => row[name][place]]);
  const cut = ranks.length > most ? `, the first ${most}` : "";
  return [
    make("h3", {}, "By rank"),
    note(`Attempt ${attempt}${numAttempts > 1 ? ", the longest of those on record" : ""}. Ranks wait for each other in every step, so their step times are alike even where one of them slows the others down; the wait for data is each rank's own. An attempt's first step is not counted. Right to 2 %.`),
    report.plots.ranks.map(drawPlot),
    drawTable("ranks", [field("rank", "number"), field("host", "", "node"), field("steps", "number"), ...times("step_s", ""), ...times("data_s", "data: ")],
      ranks.slice(0, most), { summary: `Percentiles of ${ranks.length} ranks${cut}`, sortable: true }),
  ];
};
const drawStragglers = ({ attempt, num_windows: numWindows, findings, map, ranks }) => {
  const middle = (values) => [...values].sort((one, other) => one - other)[values.length >> 1], most = 128;
  const rows = ranks.map((row) => ({ ...row, excess: middle(map.percent[row.rank]) / 100 }));
  rows.sort((one, other) => other.named - one.named || other.excess - one.excess || one.rank - other.rank);
  return [
    findings.length ? drawTable("findings", [
      field("attempt", "number"), field("begin_unix_s", "time", "since"), ["for", "duration", (row) => row.end_unix_s - row.begin_unix_s],
      field("lost_share", "share", "of each step lost"), ["what was found, and what helps", "words", (row) => `${row.sentence}. ${row.advice}`],
    ], findings) : none(`No rank has held the others up for long, in ${number(numWindows)} windows.`),
    make("h3", {}, "Ranks over time"),
    note(`Attempt ${attempt}. Colour: how much longer a rank's own part of a step (data, forward, backward, update) took than the middle rank's in the same seconds. The others wait for the dark ranks.`),
    drawHeat({ map, ranks }),
    drawTable("stragglers", [
      field("rank", "number"), field("host", "", "node"), field("own_s", "duration", "own part"), field("wait_s", "duration", "waits for others"),
      field("data_s", "duration", "of own: data"), field("excess", "share", "against the middle"), field("named", "number", "windows named"),
    ], rows.slice(0, most), { summary: `A step of each of ${rows.length} ranks${rows.length > most ? `, the slowest ${most}` : ""}`, sortable: true }),
  ];
};
const drawTime = ({ names, seconds, device_s: deviceSeconds }) => {
  const whole = Object.values(seconds).reduce((sum, one) => sum + one, 0);
  const rows = Object.entries(seconds).map(([cause, spent]) => ({ cause, name: names[cause], spent, share: spent / whole, device: deviceSeconds[cause] }));
  if (!rows.length) return [none("No attempt has begun yet.")];
  return [
    make("div", { class: "bar total", role: "img", "aria-label": "all attempts by cause" }, segments(seconds)),
    drawTable("sums", [field("name", "cause", "cause"), field("spent", "duration", "time"), field("share", "share"), field("device", "hours", "device time")], rows),
  ];
};
const drawCheckpoints = ({ saves, stored }) => {
  if (!saves.length && !stored.length) return [none("No checkpoint is on record.")];
  const good = saves.filter((save) => !save.error), stalls = good.map((save) => save.stall_s).filter(isNumber).sort((one, other) => one - other);
  const whole = stored.filter(([, size]) => size !== null).map(([step, size]) => `step ${step} (${byteSize(size)})`), torn = stored.length - whole.length;
  const sum = stalls.reduce((total, one) => total + one, 0);
  const sentences = [
    good.length ? `Saves: ${number(good.length)}, the newest of ${byteSize(good[good.length - 1].bytes)}.` : "",
    stalls.length ? `They paused training for ${duration(sum)} in total: median ${duration(stalls[stalls.length >> 1])}, longest ${duration(stalls[stalls.length - 1])}.` : "",
    good.length < saves.length ? `${saves.length - good.length} failed.` : "",
    stored.length ? `On disk now: ${whole.slice(-8).join(", ") || "none that is whole"}.` : "",
    torn ? `${torn} on disk ${torn === 1 ? "is" : "are"} not whole.` : "",
  ];
  return [
    make("p", {}, sentences.filter(Boolean).join(" ")),
    report.plots.checkpoints.map(drawPlot),
    drawTable("saves", [
      field("step", "number"), field("attempt", "number"), field("bytes", "bytes", "size"), field("stall_s", "duration", "training paused"),
      field("save_s", "duration", "until durable"), field("time_unix_s", "time", "ended"), field("error", "words"),
    ], [...saves].reverse(), { summary: `The newest saves: ${number(saves.length)}`, sortable: true }),
  ];
};
const drawEvents = ({ events, num_events: numEvents }) => {
  const shown = new Set(["event", "attempt", "time_unix_s", "step", "sentence", "is_calm"]);
  const facts = (event) => Object.entries(event).filter(([key, value]) => !shown.has(key) && value !== null).map(([key, value]) => `${key} ${isNumber(value) ? number(value) : setting(value)}`);
  const known = (event) => [event.sentence, facts(event).join(", ")].filter(Boolean).join(". ");
  if (!events.length) return [none("Nothing went wrong and nothing was asked of the run: no event is on record.")];
  return [
    numEvents > events.length ? note(`The newest ${events.length} of ${numEvents} events.`) : "",
    drawTable("events", [field("time_unix_s", "time", "time"), field("attempt", "number"), field("step", "number"), field("event", "chip"), ["what is known", "words", known]], events),
  ];
};
const drawAttempts = ({ attempts, num_superseded: numSuperseded, changes }) => {
  const steps = (row) => isNumber(row.last_step) ? `${number(row.first_step || 0)} to ${number(row.last_step)}` : "-";
  const change = (row) => row.names.map((name) => row.config[name] ? `${name}: ${row.config[name].map(setting).join(" -> ")}` : name).join("; ");
  return [
    attempts.length ? drawTable("attempts", [
      field("attempt", "number"), field("job_id", "", "job"), field("nodes"), field("world_size", "number", "ranks"), field("time_unix_s", "time", "began"),
      ["held", "duration", (row) => row.end_time_unix_s - row.time_unix_s], ["steps", "num", steps],
      ["ended", "", (row) => setting(row.reason || "-") + (row.exit_code ? ` (code ${row.exit_code})` : "")], field("action", "", "next"), field("note", "words"),
    ], attempts) : none("No attempt has begun yet."),
    numSuperseded ? note(`${number(numSuperseded)} lines of metrics.jsonl are superseded by newer attempts and not drawn.`) : "",
    changes.length ? [
      make("h3", {}, "Accepted changes"),
      drawTable("changes", [field("time_unix_s", "time", "accepted"), field("step", "number", "after step"), ["what", "words", change]], changes),
    ] : [],
  ].flat();
};
const drawSettings = ({ settings }) => {
  if (!settings.length) return [none("config.yaml cannot be read.")];
  const chosen = settings.filter((row) => row.is_chosen);
  const columns = [field("key", "code"), ["value", "", (row) => setting(row.value)], ["default", "", (row) => row.is_chosen && row.default !== null ? setting(row.default) : ""]];
  return [
    note(`${chosen.length} of ${settings.length} settings differ from the defaults.`),
    chosen.length ? drawTable("chosen", columns, chosen) : "",
    drawTable("settings", columns, settings, { summary: `All ${settings.length} settings`, isMarked: (row) => row.is_chosen }),
  ];
};
const drawProvenance = (origin, environment) => {
  if (!Object.keys(origin).length) return [none("provenance.json is missing.")];
  const known = new Set(["words", "directory", "user", "host", "python", "time_unix_s", "git_commit", "git_dirty", "git_diff", "folders", "elsewhere"]);
  const quote = (word) => /^[\w@%+=:,./-]+$/.test(word) ? word : `'${String(word).replaceAll("'", `'"'"'`)}'`;
  const list = (value) => Array.isArray(value) ? value : [], changed = (folder) => folder.git_dirty ? " with uncommitted changes" : "";
  const folder = (one) => {
    const packages = list(one.packages).length ? ` (${one.packages.join(", ")})` : "";
    return `${one.path || "-"}${packages}${one.git_commit ? `, commit ${String(one.git_commit).slice(0, 12)}` : ", not in git"}${changed(one)}`;
  };
  const { python, executable, platform, torch, cuda, driver, gpus, slurm, packages = {}, sources = {} } = environment || {};
  const models = [...new Set(list(gpus))].map((name) => `${gpus.filter((one) => one === name).length} x ${name}`);
  const others = Object.entries(origin).filter(([key, value]) => !known.has(key) && value);
  const isShort = ([, value]) => typeof value !== "object" && !String(value).includes("\n");
  const pairs = [
    ["command", Array.isArray(origin.words) ? ["python", "-m", "slurm_train", ...origin.words].map(quote).join(" ") : "-"],
    ["submitted", `${moment(origin.time_unix_s)} by ${origin.user || "-"} on ${origin.host || "-"}`],
    ["directory", origin.directory || "-"],
    ["commit", (origin.git_commit || "not a git repository") + changed(origin)],
    ["also copied", list(origin.folders).map(folder).join("\n")],
    ["not copied", list(origin.elsewhere).map(folder).join("\n")],
    ["python", executable ? `${python || ""} ${executable}` : ""],
    ["platform", platform],
    ["torch", torch ? `${torch}, built for ${cuda ? (/^\d/.test(cuda) ? "CUDA " : "") + cuda : "the CPU"}` : ""],
    ["driver", driver],
    ["GPUs", models.join(", ")],
    ["Slurm", slurm],
    ...others.filter(isShort).map(([key, value]) => [plain(key), setting(value)]),
  ];
  const versions = Object.entries(packages || {}).map(([name, version]) => {
    const source = (sources || {})[name] || {}, facts = [source.editable ? "editable" : "", source.commit, source.url].filter(Boolean);
    return `${name} ${version}${facts.length ? ` (${facts.join(", ")})` : ""}`;
  });
  const lines = (value) => typeof value === "string" ? value.split("\n") : Array.isArray(value) ? value.map(setting) : Object.entries(value).map(([key, item]) => `${key} ${setting(item)}`);
  const differences = [["", origin.git_diff], ...list(origin.folders).map((one) => [` in ${one.path || "-"}`, one.git_diff])].filter(([, diff]) => diff);
  return [
    make("dl", { class: "facts" }, pairs.filter(([, value]) => value).map(([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, setting(value))))),
    versions.length ? drawFolded(`${versions.length} packages`, versions.join("\n")) : "",
    ...differences.map(([where, diff]) => drawFolded(`Uncommitted changes${where}: ${String(diff).split("\n").length} lines of difference`, String(diff), true)),
    ...others.filter((other) => !isShort(other)).map(([key, value]) => drawFolded(`${plain(key)}: ${lines(value).length} lines`, lines(value).join("\n"))),
  ];
};
const drawFailures = (runs, keys) => {
  const most = 200, failed = runs.filter((run) => run.has_failed);
  if (!failed.length) return [];
  const given = keys.map((key) => [key, "", (run) => run.given[key]]);
  return [
    drawTable("failures", [field("index", "number", "run"), field("state", "chip"), ["why", "words", (run) => run.note || "no reason is on record"], ...given], failed.slice(0, most)),
    failed.length > most ? note(`${failed.length - most} more, see the table of all runs.`) : "",
  ];
};
const drawRuns = (runs, keys) => {
  const first = ["index", "run", ...keys, "state", "best_" + report.metric], names = { index: "run", run: "id", gpu_hours: "device hours" };
  const isThere = (name) => runs.some(({ cells }) => cells[name] !== null && cells[name] !== undefined && cells[name] !== "");
  const columns = [...new Set([...first, ...runs.flatMap(({ cells }) => Object.keys(cells))])].filter(isThere).map((name) => {
    const kind = { state: "chip", run: "code", note: "words" }[name] || (runs.some(({ cells }) => isNumber(cells[name])) ? "num" : "");
    const read = name === "run" ? (run) => run.run.split("/")[1] : name === "state" ? (run) => run.state : (run) => run.cells[name];
    return [names[name] || (name.includes(".") ? name : plain(name)), kind, read];
  });
  return drawTable("runs", columns, runs, { sortable: true, search: true });
};

const runSections = () => {
  const { plots, attempts, events } = report, isMfuKnown = plots.speed.some(({ key }) => key === "mfu");
  return [
    ["training", "Training", () => plots.training.map(drawPlot)],
    ["speed", "Speed", () => [
      ...plots.speed.map(drawPlot),
      plots.speed.length && !isMfuKnown ? note("MFU is not known: no peak is on record for this device, or no count of operations for this model.") : "",
      ...(report.ranks ? drawRanks(report.ranks) : []),
      ...report.profiles.map((path) => make("p", {}, ["Profile, for ui.perfetto.dev: ", make("a", { href: path }, path)])),
    ]],
    ["stragglers", "Who holds the others up", () => report.stragglers ? drawStragglers(report.stragglers) : []],
    ["time", "What the hours went to", () => [...drawTime(report.time), ...(attempts.length ? drawTimeline(attempts, events) : [])]],
    ["checkpoints", "Checkpoints", () => drawCheckpoints(report)],
    ["events", "Events", () => drawEvents(report)],
    ["attempts", "Attempts", () => drawAttempts(report)],
    ["settings", "Settings", () => drawSettings(report)],
    ["provenance", "Provenance", () => drawProvenance(report.provenance, report.environment)],
  ];
};
const sweepSections = () => {
  const { plots, runs, parallel } = report, keys = [...new Set(runs.flatMap(({ given }) => Object.keys(given)))];
  return [
    ["failures", "Ended without a result", () => drawFailures(runs, keys)],
    ["values", "Values and results", () => [parallel ? drawParallel(parallel) : none("The runs differ in nothing that could be drawn."), ...plots.values.map(drawPlot)]],
    ["curves", "Curves", () => plots.curves.map(drawPlot)],
    ["runs", "Runs", () => [drawRuns(runs, keys)]],
    ["time", "What the hours went to", () => drawTime(report.time)],
    ["settings", "Settings that the runs share", () => drawSettings(report)],
    ["provenance", "Provenance", () => drawProvenance(report.provenance, report.environment)],
  ];
};
// Files of a run may be damaged in any way: that costs one section, not the page.
const drawAll = (draw) => {
  try {
    return draw().flat().filter((one) => one !== "");
  } catch (error) {
    return [none(`This part cannot be shown: ${error.message}`)];
  }
};
const timeTiles = ({ goodput, held_device_s: deviceSeconds, num_attempts: count }, remark) => count ? [
  ["device time", hours(deviceSeconds), remark],
  ...(goodput === null ? [] : [["goodput", share(goodput), "of the held time went into steps that count"]]),
] : [];
const runTiles = () => {
  const { progress: { step, max_steps: most, loss, evaluations, mfu, ...rates }, time, attempts } = report;
  return [
    ["step", number(step), most ? `of ${number(most)}, ${share(step / most)}` : ""],
    ["loss", number(loss, 4), "training, newest"],
    ...evaluations.slice(0, 3).map(([key, value, at]) => [plain(key), number(value, 4), at === null ? "at the end" : `at step ${number(at)}`]),
    ...["tokens", "samples"].filter((unit) => isNumber(rates[unit + "_per_s"])).map((unit) => ["speed", number(rates[unit + "_per_s"], 3), `${unit}/s, newest`]),
    ...(isNumber(mfu) ? [["MFU", share(mfu), "newest"]] : []),
    ...(attempts.length ? [["attempts", String(attempts.length), `since ${moment(attempts[0].time_unix_s)}`]] : []),
    ...timeTiles(time, `${duration(time.held_s)}${attempts.length ? ` on ${attempts[attempts.length - 1].world_size || 1} ranks` : ""}`),
  ];
};
const sweepTiles = () => {
  const { runs, metric, time } = report, best = runs.find((run) => run.place === 0);
  return [
    ["runs", String(runs.length), `${runs.filter(({ state }) => state === "finished").length} finished`],
    ...(best ? [[`best ${plain(metric)}`, number(best.value, 4), best.label]] : []),
    ...timeTiles(time, `${time.num_attempts} attempts`),
  ];
};
const states = () => {
  const counts = new Map();
  report.runs.forEach(({ state }) => counts.set(state, (counts.get(state) || 0) + 1));
  return [...counts].sort(([, one], [, other]) => other - one).map(([state, count]) => chip(`${count} ${state}`, moods[state]));
};

const drawSection = ([key, title, blocks]) => {
  const one = make("section", { id: key }, make("h2", {}, title));
  for (const drawn of blocks) {
    const before = one.lastElementChild;
    if (drawn.tagName !== "FIGURE") one.append(drawn);
    else if (before.className === "plots") before.append(drawn);
    else one.append(make("div", { class: "plots" }, drawn));
  }
  return one;
};

const isRun = report.kind === "run";
const sections = (isRun ? runSections() : sweepSections()).map(([key, title, draw]) => [key, title, drawAll(draw)]).filter(([, , blocks]) => blocks.length);
fill(document.querySelector(".links"), {}, sections.map(([key, title]) => make("a", { href: "#" + key }, title)));
fill(document.querySelector("header"), {}, [
  make("h1", {}, make("span", {}, report.name), make("code", {}, report.id), isRun ? chip(report.state) : states()),
  isRun && report.note ? make("p", { class: moods[report.state] ? "sentence" : "sentence bad" }, report.note) : "",
  make("p", { class: "path" }, make("code", {}, report.path)),
  make("dl", { class: "tiles" }, (isRun ? runTiles() : sweepTiles()).map(([name, value, remark]) => make("div", { class: "tile" }, make("dt", {}, name), make("dd", {}, value, remark ? make("small", {}, remark) : "")))),
]);
fill(document.querySelector("main"), {}, sections.map(drawSection));
fill(document.querySelector("footer"), {}, [`written ${moment(report.written_unix_s)} by slurm_train report`]);

const theme = document.getElementById("theme"), wish = window.matchMedia("(prefers-color-scheme: dark)");
const paint = (name, width) => {
  root.dataset.theme = name;
  theme.textContent = name === "dark" ? "light" : "dark";
  plots.forEach((plot) => plot.build(width && width(plot)));
};
paint(wish.matches ? "dark" : "light");
wish.addEventListener("change", () => paint(wish.matches ? "dark" : "light"));
theme.addEventListener("click", () => paint(theme.textContent));

// Paper is white, as wide as it is, and has no folds to open.
let before = null;
window.addEventListener("beforeprint", () => {
  before = { theme: root.dataset.theme, folds: [...document.querySelectorAll("details:not([open]):not(.difference)")] };
  before.folds.forEach((one) => { one.open = true; });
  paint("light", (plot) => plot.isWide ? 640 : 310);
});
window.addEventListener("afterprint", () => {
  before.folds.forEach((one) => { one.open = false; });
  paint(before.theme);
});
