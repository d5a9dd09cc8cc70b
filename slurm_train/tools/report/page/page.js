// Draws the document of a report: one function per kind of block. Strings are inserted as text, never as markup.
(() => {
  "use strict";
  const report = JSON.parse(document.getElementById("document").textContent);
  const root = document.documentElement, box = document.getElementById("readout");

  const fill = (one, attributes, children) => {
    for (const [name, value] of Object.entries(attributes)) {
      if (name === "style") Object.assign(one.style, value);
      else if (value !== null && value !== undefined && value !== false) one.setAttribute(name, value === true ? "" : value);
    }
    one.append(...children.flat(2).filter((child) => child !== null && child !== undefined && child !== ""));
    return one;
  };
  const make = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);
  const makeSvg = (tag, attributes, ...children) =>
    fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
  const percent = (part) => (100 * part).toFixed(3) + "%";

  const format = (value) => {
    const size = Math.abs(value);
    if (value !== 0 && (size >= 1e9 || size < 1e-4)) return value.toExponential(3);
    return size >= 1e4 || Number.isInteger(value) ? Math.round(value).toLocaleString("en-US") : String(Number(value.toPrecision(5)));
  };
  const short = (value) => {
    const [size, letter] = [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]]
      .find(([size]) => Math.abs(value) >= size * (size === 1e3 ? 10 : 1) && Math.abs(value) < 1e15) || [1, ""];
    return Number((value / size).toPrecision(4)) + letter;
  };
  const inTime = (seconds, most) => {
    const [size, unit] = [[86400, "d"], [3600, "h"], [60, "min"]].find(([size]) => seconds >= 2 * size) || [1, "s"];
    const rough = seconds / size / most, power = 10 ** Math.floor(Math.log10(rough || 1));
    const step = power * [1, 2, 5, 10].find((factor) => factor * power >= rough * 0.999);
    const ticks = [];
    for (let index = 0; index * step * size <= seconds && index < 50; index++) ticks.push(index * step);
    return { unit, labels: ticks.map((tick) => [tick * size / seconds, Number(tick.toPrecision(6)) + " " + unit]) };
  };

  const show = (event, rows) => {
    box.replaceChildren(...rows.map(([name, value]) => make("div", {}, make("span", {}, name), make("span", {}, value))));
    box.hidden = false;
    const gap = 16, size = box.getBoundingClientRect();
    const left = event.clientX + gap + size.width > innerWidth ? event.clientX - gap - size.width : event.clientX + gap;
    box.style.left = Math.max(4, left) + "px";
    box.style.top = Math.max(4, Math.min(event.clientY + gap, innerHeight - size.height - 4)) + "px";
  };
  const hide = () => { box.hidden = true; };

  // Runs of a sweep: brushes choose them, and what is pointed at lights up in lines, rows and curves.
  const sweep = { lines: [], facts: new Map(), brushes: new Map(), off: new Set(), hot: null };
  const light = (run, source) => {
    if (run === sweep.hot) return;
    sweep.hot = run;
    document.querySelectorAll("[data-run]").forEach((one) => one.classList.toggle("hot", one.dataset.run === String(run)));
    plots.forEach((plot) => plot !== source && plot.light(run));
  };
  const choose = () => {
    sweep.off = new Set(sweep.lines.filter((one) => [...sweep.brushes].some(
      ([axis, [low, high]]) => one.at[axis] === null || one.at[axis] < low || one.at[axis] > high)).map((one) => one.run));
    const find = document.getElementById("find"), words = find ? find.value.toLowerCase() : "";
    for (const one of document.querySelectorAll("[data-run]")) {
      const isMissed = one.closest("table.runs") && !one.textContent.toLowerCase().includes(words);
      one.classList.toggle("off", isMissed || sweep.off.has(Number(one.dataset.run)));
    }
    document.getElementById("all-runs").disabled = !sweep.brushes.size;
    const count = sweep.lines.length;
    document.getElementById("chosen").textContent = sweep.brushes.size ? `${count - sweep.off.size} of ${count} runs` : "";
    plots.forEach((plot) => plot.choose());
  };

  const caption = (block, ...more) =>
    make("figcaption", {}, make("span", { class: "title" }, block.title), make("span", { class: "unit" }, block.unit || ""), more);

  const plots = [];
  const colour = (name) => getComputedStyle(root).getPropertyValue("--" + name).trim();

  const drawPlot = (block) => {
    const figure = make("figure", { class: block.is_wide ? "plot wide" : "plot", id: "plot-" + block.key });
    const note = block.note ? make("p", { class: block.curves.length ? "note" : "none" }, block.note) : "";
    if (!block.curves.length) return fill(figure, {}, [caption(block), note]);
    const area = make("div", { class: "area", role: "img", "aria-label": `${block.title} against ${block.x_label}` });
    const isMany = block.curves.length > 8, isSweep = block.curves.some((curve) => curve.run !== null);
    let u = null, scale = block.scales[0];
    const button = block.scales.length > 1 ? make("button", { type: "button", class: "switch" }) : "";
    const runs = [null];

    const series = (data, bands) => block.curves.flatMap((curve) => {
      const stroke = colour(curve.colour), index = data.length;
      const text = (_, value, __, place) => value === null || value === undefined ? "" : format(value)
        + (block.unit ? " " + block.unit : "")
        + (curve.low ? ` (${format(curve.low[place])} to ${format(curve.high[place])})` : "")
        + (curve.labels ? ", " + curve.labels[place] : "");
      const one = { label: curve.name, stroke, width: 1.6, value: text, spanGaps: true };
      const num = curve.y.filter((value) => value !== null).length;
      one.points = isMany || num < block.x.length ? { show: !isMany && num <= 60, size: 5, fill: stroke } : { fill: stroke };
      if (curve.kind === "steps") [one.paths, one.points] = [uPlot.paths.stepped({ align: 1 }), { show: false }];
      if (curve.kind === "dots" || curve.kind === "ranges") {
        one.points = { show: true, size: 6, fill: stroke };
        one.paths = () => null;
      }
      data.push(curve.y);
      runs[index] = curve.run;
      if (!curve.low) return [one];
      if (curve.kind === "ranges") {
        one.width = 3;
        one.paths = (u, _, from, to) => {
          const path = new Path2D();
          for (let place = from; place <= to; place++) {
            if (curve.low[place] === null) continue;
            const x = u.valToPos(block.x[place], "x", true);
            path.moveTo(x, u.valToPos(curve.low[place], "y", true));
            path.lineTo(x, u.valToPos(curve.high[place], "y", true));
          }
          return { stroke: path };
        };
      } else bands.push({ series: [index + 2, index + 1], fill: stroke + "38" });
      data.push(curve.low, curve.high);
      // In the legend only for the axis, which has to hold them; the style sheet hides them.
      const edge = { ...one, width: 1, stroke: stroke + "60", points: { show: false }, class: "edge" };
      if (curve.kind === "ranges") edge.paths = () => null;
      else delete edge.paths;
      return [one, edge, { ...edge }];
    });

    // The nearest place at which a curve has a value, as long as that is not somewhere else.
    const nearest = (u, index, at) => {
      const column = u.data[index], x = u.data[0], reach = (u.scales.x.max - u.scales.x.min) / 50;
      for (let away = 0; away < x.length; away++) {
        const found = [at - away, at + away].find((place) => column[place] !== null && column[place] !== undefined);
        if (found !== undefined) return Math.abs(x[found] - x[at]) <= reach || isMany ? found : at;
      }
      return at;
    };
    const yRange = (u, low, high) => {
      if (low === null || high === null) return [1, 2];
      if (scale === "log") {
        const least = Math.min(...block.curves.flatMap((curve) => curve.y.filter((value) => value > 0)));
        return [Math.max(low, least / 10) / 1.08, high * 1.08];
      }
      const bottom = block.from_zero ? Math.min(low, 0) : low, top = block.from_zero ? Math.max(high, 0) : high;
      const room = (top - bottom) * 0.05 || Math.abs(top) / 2 || 0.5;
      return [block.from_zero && bottom === 0 ? 0 : bottom - room, top + room];
    };
    const xRange = (u, low, high) => {
      if (block.x.length === 1) return [block.x[0] - 1, block.x[0] + 1];
      const room = block.x_label === "rank" ? 0.5 : block.curves.some((curve) => curve.kind === "dots") ? (high - low) / 50 : 0;
      return [low - room, high + room];
    };
    const mark = (u) => {
      u.over.querySelectorAll(".mark").forEach((one) => one.remove());
      let free = 0;
      for (const [x, text, kind] of block.marks) {
        const left = u.valToPos(x, "x"), isNamed = (kind === "attempt" || kind === "node") && left >= free;
        if (left < 0 || left > u.over.clientWidth) continue;
        if (isNamed) free = left + 8 + 6 * text.length;
        u.over.append(make("i", { class: "mark " + kind, title: text, style: { left: left + "px" } }, isNamed ? text : ""));
      }
    };

    const build = (width = area.clientWidth) => {
      if (u) u.destroy();
      const data = [block.x], bands = [], axis = { stroke: colour("muted"), font: "12px system-ui", grid: { stroke: colour("grid"), width: 1 }, ticks: { show: false } };
      const x = { label: block.x_label, value: (_, value) => value === null ? "" : format(value) };
      u = new uPlot({
        width: Math.max(120, width),
        height: block.is_wide ? 300 : 200,
        series: [x, ...series(data, bands)],
        bands,
        scales: { x: { time: false, range: xRange }, y: { distr: scale === "log" ? 3 : 1, range: yRange } },
        axes: [
          { ...axis, label: block.x_label, labelSize: 18, labelFont: "12px system-ui", size: 26, values: (_, ticks) => ticks.map((tick) => Number.isInteger(tick) ? short(tick) : "") },
          { ...axis, size: 58, values: (_, ticks) => ticks.map((tick) => tick === null ? "" : short(tick)) },
        ],
        legend: { show: !isMany },
        focus: { alpha: isSweep ? 0.2 : 1 },
        cursor: { y: false, dataIdx: nearest, points: { show: !isMany }, focus: { prox: isMany ? 24 : -1 } },
        hooks: {
          draw: [mark],
          setSeries: [(_, index, change) => { if (isMany && "focus" in change) light(index === null ? null : runs[index], plot); }],
        },
      }, data, area);
      if (button) {
        button.textContent = scale === "log" ? "log" : "linear";
        button.setAttribute("aria-label", `scale: ${scale}, press for the other`);
      }
      plot.choose();
    };
    const plot = {
      build,
      isWide: block.is_wide,
      choose() {
        if (u && isSweep) u.batch(() => runs.forEach((run, index) => run !== null && run !== undefined && u.setSeries(index, { show: !sweep.off.has(run) }, false)));
      },
      light(run) { if (u && isSweep) u.setSeries(run === null || !runs.includes(run) ? null : runs.indexOf(run), { focus: true }, false); },
    };
    plots.push(plot);
    if (button) button.addEventListener("click", () => { scale = block.scales.find((one) => one !== scale); build(); });
    if (isMany) {
      area.addEventListener("pointermove", (event) => {
        if (sweep.hot === null) return hide();
        const curve = block.curves.find((one) => one.run === sweep.hot);
        show(event, sweep.facts.get(sweep.hot) || [["", curve ? curve.name : ""]]);
      });
      area.addEventListener("pointerleave", () => { hide(); light(null); });
    }
    new ResizeObserver(() => { if (u && area.clientWidth && u.width !== area.clientWidth) u.setSize({ width: area.clientWidth, height: u.height }); }).observe(area);
    return fill(figure, {}, [caption(block, button), area, note]);
  };

  const drawHeat = (block) => {
    const levels = [5, 10, 25, 50, 100], count = block.hosts.length, edges = block.edges_s, whole = edges[edges.length - 1] || 1;
    const paths = levels.map(() => "");
    block.percent.forEach((ranks, rank) => ranks.forEach((value, column) => {
      const level = levels.filter((least) => value >= least).length - 1;
      if (level >= 0) paths[level] += `M${edges[column]} ${rank}H${edges[column + 1]}v1H${edges[column]}z`;
    }));
    const nodes = block.hosts.map((host, rank) => rank && host !== block.hosts[rank - 1] ? `M0 ${rank}H${whole}` : "").join("");
    const svg = makeSvg("svg", { viewBox: `0 0 ${whole} ${count}`, preserveAspectRatio: "none", role: "img", "aria-label": `${block.title}, against time` },
      paths.map((path, level) => makeSvg("path", { d: path, class: `heat h${level + 1}` })), makeSvg("path", { d: nodes, class: "node-line" }));
    svg.addEventListener("pointermove", (event) => {
      const size = svg.getBoundingClientRect(), at = whole * (event.clientX - size.left) / size.width;
      const rank = Math.min(count - 1, Math.max(0, Math.floor(count * (event.clientY - size.top) / size.height)));
      const column = Math.max(0, edges.findIndex((edge) => edge > at) - 1);
      show(event, [["rank", `${rank} on ${block.hosts[rank]}`], ["against the middle", `${block.percent[rank][column]} %`]]);
    });
    svg.addEventListener("pointerleave", hide);
    const every = Math.ceil(count / 16), time = inTime(whole, 6);
    const ranks = block.hosts.map((host, rank) => rank % every ? "" : make("span", { title: host, style: { top: percent((rank + 0.5) / count) } }, String(rank)));
    const legend = levels.map((least, level) => make("span", {}, make("i", { class: `key h${level + 1}` }), `${least} % longer${level === 4 ? " or more" : ""}`));
    return make("figure", { class: "wide heatmap", id: "plot-" + block.key }, caption(block, make("span", { class: "legend" }, legend)),
      make("div", { class: "frame" }, make("div", { class: "ranks" }, ranks),
        make("div", { class: "cells", style: { height: Math.min(19, Math.max(3, 1.3 * count)) + "rem" } }, svg),
        make("div", { class: "axis" }, time.labels.map(([at, text]) => make("span", { style: { left: percent(at) } }, text)))),
      make("p", { class: "note" }, `rank against time since ${block.since}`));
  };

  const segments = (seconds, words) => {
    const whole = Object.values(seconds).reduce((sum, one) => sum + one, 0) || 1;
    return Object.keys(words).filter((cause) => seconds[cause] > 0).map((cause) => make("span", {
      class: "seg " + cause, title: `${words[cause]}: ${(100 * seconds[cause] / whole).toPrecision(3)} %`,
      style: { width: percent(seconds[cause] / whole), backgroundColor: `var(--${cause})` },
    }));
  };
  const drawCauses = (block) => make("div", { class: "bar total", role: "img", "aria-label": "all attempts by cause" }, segments(block.seconds, block.words));
  const drawTimeline = (block) => {
    const whole = block.end_unix_s - block.begin_unix_s || 1, place = (unix_s) => percent((unix_s - block.begin_unix_s) / whole);
    const row = (who, lane, why, title) => make("div", { class: "row", title }, make("span", { class: "who" }, who), lane, make("span", { class: "why" }, why));
    const rows = block.bars.map((bar) => row(String(bar.attempt), make("div", { class: "lane" },
      make("div", { class: "bar", style: { left: place(bar.begin_unix_s), width: percent((bar.end_unix_s - bar.begin_unix_s) / whole) } }, segments(bar.seconds, block.words)),
      block.events.filter(([attempt, at]) => attempt === bar.attempt && at >= block.begin_unix_s && at <= block.end_unix_s).map(([, at, text, isCalm]) =>
        make("i", { class: isCalm ? "mark calm" : "mark event", title: text, style: { left: place(at) } }))),
      bar.reason, `attempt ${bar.attempt}: ${bar.held}, ${bar.reason}`));
    const axis = make("div", { class: "lane axis" }, inTime(whole, 5).labels.map(([at, text]) => make("span", { style: { left: percent(at) } }, text)));
    return make("div", { class: block.bars.length > 16 ? "timeline dense" : "timeline" }, rows, row("", axis, "", "since " + block.since));
  };

  const drawParallel = (block) => {
    const nowhere = -0.08, last = block.axes.length - 1, height = (run, axis) => run.at[axis] === null ? nowhere : run.at[axis];
    sweep.lines = block.runs;
    block.runs.forEach((run) => sweep.facts.set(run.run, run.facts));
    const lines = block.runs.map((run) => makeSvg("path", {
      d: "M" + run.at.map((_, axis) => `${axis / last} ${1 - height(run, axis)}`).join("L"), "data-run": run.run,
      class: `run-line ${run.colour}${run.has_value ? "" : " no-value"}`, style: { stroke: `var(--${run.colour})` },
    }));
    const svg = makeSvg("svg", { viewBox: "0 0 1 1", preserveAspectRatio: "none", role: "img", "aria-label": "one line per run through the values that it was given and the metric that it reached" }, lines);
    const axes = block.axes.map((axis, index) => {
      const grip = make("button", { class: "grip", type: "button", "aria-label": `choose by ${axis.name}` }), brush = make("div", { class: "brush", hidden: true });
      const isMissing = block.runs.some((run) => run.at[index] === null);
      let start = null;
      const share = (event) => { const size = one.getBoundingClientRect(); return 1 - (event.clientY - size.top) / size.height; };
      const one = make("div", { class: "axis-line", "data-axis": index, style: { left: percent(index / last) } }, make("span", { class: "name", title: axis.name }, axis.name),
        axis.ticks.concat(isMissing ? [[nowhere, "none"]] : []).map(([at, text]) => make("span", { class: "tick", style: { bottom: percent(at) } }, text)), brush, grip);
      const drop = () => { brush.hidden = true; sweep.brushes.delete(index); };
      one.addEventListener("letgo", drop);
      grip.addEventListener("pointerdown", (event) => { start = share(event); grip.setPointerCapture(event.pointerId); hide(); event.preventDefault(); });
      grip.addEventListener("pointermove", (event) => {
        if (start === null || Math.abs(share(event) - start) <= 0.015) return;
        const low = Math.max(-0.02, Math.min(start, share(event))), high = Math.min(1.02, Math.max(start, share(event)));
        brush.hidden = false;
        Object.assign(brush.style, { bottom: percent(low), height: percent(high - low) });
        sweep.brushes.set(index, [low, high]);
        choose();
      });
      grip.addEventListener("pointerup", (event) => {
        if (start !== null && Math.abs(share(event) - start) <= 0.015) { drop(); choose(); }
        start = null;
      });
      return one;
    });
    const stage = make("div", { class: "stage" }, svg, axes);
    stage.addEventListener("pointermove", (event) => {
      if (event.buttons) return;
      const size = stage.getBoundingClientRect(), across = Math.min(1, Math.max(0, (event.clientX - size.left) / size.width)) * last;
      const up = 1 - (event.clientY - size.top) / size.height, left = Math.min(last - 1, Math.floor(across)), part = across - left;
      let best = null, least = 0.05;
      for (const run of block.runs) {
        const away = Math.abs(height(run, left) * (1 - part) + height(run, left + 1) * part - up);
        if (!sweep.off.has(run.run) && away < least) [best, least] = [run, away];
      }
      light(best && best.run);
      if (best) show(event, best.facts); else hide();
    });
    stage.addEventListener("pointerleave", () => { light(null); hide(); });
    const all = make("button", { type: "button", id: "all-runs", disabled: true }, "all runs");
    all.addEventListener("click", () => { axes.forEach((axis) => axis.dispatchEvent(new Event("letgo"))); choose(); });
    const ramp = make("span", { class: "ramp" }, "best", ["q0", "q1", "q2", "q3", "q4"].map((name) => make("i", { style: { backgroundColor: `var(--${name})` } })), "worst", make("i", { style: { backgroundColor: "var(--failed)" } }), "failed");
    return make("figure", { class: "wide", id: "parallel" }, caption(block, ramp, make("span", { class: "controls" }, make("span", { id: "chosen", class: "note", role: "status" }), all)),
      make("div", { class: "parallel" }, stage),
      make("p", { class: "note on-screen" }, "Drag along an axis to keep only the runs that pass there, click it to let go; the curves and the table follow. Dashed: no value."));
  };

  const fold = (text) => text.length <= 120 ? text
    : make("details", { class: "fold" }, make("summary", {}, text.slice(0, 100) + " ..."), make("div", { class: "full" }, text));
  const cell = (value, css) => {
    const text = Array.isArray(value) ? value[0] : value;
    if (css === "chip") return make("span", { class: "chip " + value[1] }, text);
    if (css === "cause") return [make("i", { class: "swatch " + value[1], style: { backgroundColor: `var(--${value[1]})` } }), text];
    return css === "code" ? make("code", {}, text) : fold(text);
  };
  const drawTable = (block) => {
    const style = (column) => block.columns[column].css === "chip" ? null : block.columns[column].css || null;
    const key = (row, column) => {
      const value = Array.isArray(row[column]) && block.columns[column].css !== "chip" ? row[column][1] : [row[column]].flat()[0];
      return value === "" ? null : value;
    };
    // What is missing comes last, whichever way round; numbers come before texts.
    const compare = (one, other, way) => {
      if (one === null || other === null) return (one === null) - (other === null);
      if (typeof one !== typeof other) return typeof one === "number" ? -1 : 1;
      return way * (one < other ? -1 : one > other ? 1 : 0);
    };
    const rows = block.rows.map((row, index) => {
      const run = block.runs ? block.runs[index] : null;
      const one = make("tr", { class: (block.marked || []).includes(index) ? "marked" : null, "data-run": run },
        row.map((value, column) => make("td", { class: style(column) }, cell(value, block.columns[column].css))));
      if (run !== null) one.addEventListener("pointerenter", () => light(run));
      if (run !== null) one.addEventListener("pointerleave", () => light(null));
      return one;
    });
    const body = make("tbody", {}, rows), heads = block.columns.map(({ name }, column) => make("th", { scope: "col", class: style(column) }, block.sortable ? make("button", { type: "button" }, name) : name));
    heads.forEach((head, column) => head.addEventListener("click", () => {
      if (!block.sortable) return;
      const way = head.getAttribute("aria-sort") === "ascending" ? -1 : 1;
      heads.forEach((one) => one.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", way > 0 ? "ascending" : "descending");
      const order = block.rows.map((row, index) => index).sort((one, other) => compare(key(block.rows[one], column), key(block.rows[other], column), way) || one - other);
      body.append(...order.map((index) => rows[index]));
    }));
    const found = make("div", { class: "scroll" }, make("table", { class: block.name }, make("thead", {}, make("tr", {}, heads)), body));
    if (block.summary) return make("details", {}, make("summary", {}, block.summary), found);
    if (block.name !== "runs") return found;
    const find = make("input", { type: "search", id: "find", placeholder: "rows with ...", "aria-label": "rows with" });
    find.addEventListener("input", choose);
    return make("div", {}, find, found);
  };

  const drawFolded = (block) => {
    const kind = (line) => /^(\+\+\+|---|diff |@@|index )/.test(line) ? "head" : { "+": "added", "-": "removed" }[line[0]] || null;
    const text = block.is_diff ? block.text.split("\n").map((line) => make("span", { class: kind(line) }, line + "\n")) : block.text;
    return make("details", { class: block.is_diff ? "difference" : null }, make("summary", {}, block.summary), make("pre", {}, text));
  };
  const drawers = {
    plot: drawPlot, heatmap: drawHeat, causes: drawCauses, timeline: drawTimeline, parallel: drawParallel, table: drawTable, folded: drawFolded,
    text: (block) => make(block.css === "heading" ? "h3" : "p", { class: block.css || null }, block.text),
    facts: (block) => make("dl", { class: "facts" }, block.pairs.map(([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, value)))),
  };
  const drawSection = ({ key, title, blocks }) => {
    const one = make("section", { id: key }, make("h2", {}, title));
    for (const block of blocks) {
      const drawn = drawers[block.kind](block), before = one.lastElementChild;
      if (drawn.tagName !== "FIGURE") one.append(drawn);
      else if (before.className === "plots") before.append(drawn);
      else one.append(make("div", { class: "plots" }, drawn));
    }
    return one;
  };

  const sections = report.sections.filter((section) => section.blocks.length), [sentence, mood] = report.sentence;
  fill(document.querySelector(".links"), {}, sections.map(({ key, title }) => make("a", { href: "#" + key }, title)));
  fill(document.querySelector("header"), {}, [
    make("h1", {}, make("span", {}, report.name), make("code", {}, report.id), report.chips.map(([text, mood]) => make("span", { class: "chip " + mood }, text))),
    sentence ? make("p", { class: "sentence " + mood }, sentence) : "",
    make("p", { class: "path" }, make("code", {}, report.path)),
    make("dl", { class: "tiles" }, report.tiles.map(([name, value, remark]) => make("div", { class: "tile" }, make("dt", {}, name), make("dd", {}, value, remark ? make("small", {}, remark) : "")))),
  ]);
  fill(document.querySelector("main"), {}, sections.map(drawSection));
  fill(document.querySelector("footer"), {}, [report.written]);

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
})();
