// A sweep: brushes on the axes choose runs, a search chooses rows, and what is pointed at lights up everywhere.
(() => {
  "use strict";
  const figure = document.getElementById("parallel");
  const texts = figure ? JSON.parse(figure.querySelector("script").textContent) : {};
  const parts = new Map();
  for (const part of document.querySelectorAll("[data-run]")) {
    const run = part.dataset.run;
    if (!parts.has(run)) parts.set(run, []);
    parts.get(run).push(part);
  }
  if (!parts.size) return;

  let hot = null;
  const light = (run) => {
    if (run === hot) return;
    for (const one of hot === null ? [] : parts.get(hot) || []) one.classList.remove("hot");
    hot = run;
    for (const one of run === null ? [] : parts.get(run) || []) one.classList.add("hot");
  };
  const tell = (event, run) => {
    light(run);
    window.readout.show(event, (texts[run] || []).map(([name, value]) => window.readout.line(name, value)));
  };
  window.sweep = { light, isOff: (run) => off.has(run) };

  const lines = figure ? [...figure.querySelectorAll(".run-line")].map((path) => ({
    run: path.dataset.run,
    at: path.dataset.v.split(",").map((text) => text === "" ? null : Number(text)),
  })) : [];
  const brushes = new Map();
  const off = new Set();
  const find = document.getElementById("find"), all = document.getElementById("all-runs"), said = document.getElementById("chosen");

  const apply = () => {
    off.clear();
    for (const one of lines) {
      for (const [axis, [low, high]] of brushes) {
        const value = one.at[axis];
        if (value === null || value < low || value > high) off.add(one.run);
      }
    }
    const words = (find ? find.value : "").toLowerCase();
    for (const [run, found] of parts) {
      for (const part of found) {
        const isRow = part.tagName === "TR" && part.closest("table.runs");
        const isMissed = isRow && words && !part.textContent.toLowerCase().includes(words);
        part.classList.toggle("off", isMissed || (off.has(run) && (isRow || part.tagName !== "TR")));
      }
    }
    if (all) all.disabled = !brushes.size;
    if (said) said.textContent = brushes.size ? lines.length - off.size + " of " + lines.length + " runs" : "";
  };

  for (const axis of figure ? figure.querySelectorAll(".axis-line") : []) {
    const grip = axis.querySelector(".grip"), index = Number(axis.dataset.axis);
    let brush = null, start = null;
    const share = (event) => {
      const size = axis.getBoundingClientRect();
      return 1 - (event.clientY - size.top) / size.height;
    };
    const drop = () => {
      if (brush) brush.remove();
      brush = null;
      brushes.delete(index);
    };
    const draw = (one, other) => {
      if (!brush) {
        brush = document.createElement("div");
        brush.className = "brush";
        axis.append(brush);
      }
      const low = Math.max(-0.02, Math.min(one, other)), high = Math.min(1.02, Math.max(one, other));
      brush.style.bottom = 100 * low + "%";
      brush.style.height = 100 * (high - low) + "%";
      brushes.set(index, [low, high]);
    };
    axis.addEventListener("letgo", drop);
    grip.addEventListener("pointerdown", (event) => {
      start = share(event);
      grip.setPointerCapture(event.pointerId);
      window.readout.hide();
      event.preventDefault();
    });
    grip.addEventListener("pointermove", (event) => {
      if (start === null) return;
      if (Math.abs(share(event) - start) > 0.015) {
        draw(start, share(event));
        apply();
      }
    });
    grip.addEventListener("pointerup", (event) => {
      if (start !== null && Math.abs(share(event) - start) <= 0.015) {
        drop();
        apply();
      }
      start = null;
    });
  }
  if (all) {
    all.addEventListener("click", () => {
      figure.querySelectorAll(".axis-line").forEach((axis) => axis.dispatchEvent(new Event("letgo")));
      apply();
    });
  }
  if (find) find.addEventListener("input", apply);

  const stage = figure && figure.querySelector(".stage");
  if (stage) {
    const num = stage.querySelectorAll(".axis-line").length;
    stage.addEventListener("pointermove", (event) => {
      if (event.buttons) return;
      const size = stage.getBoundingClientRect();
      const across = Math.min(1, Math.max(0, (event.clientX - size.left) / size.width)) * (num - 1);
      const up = 1 - (event.clientY - size.top) / size.height;
      const left = Math.min(num - 2, Math.floor(across)), part = across - left;
      const height = (one, axis) => one.at[axis] === null ? -0.08 : one.at[axis];
      let best = null, least = 0.05;
      for (const one of lines) {
        if (off.has(one.run)) continue;
        const away = Math.abs(height(one, left) * (1 - part) + height(one, left + 1) * part - up);
        if (away < least) [best, least] = [one.run, away];
      }
      if (best === null) {
        light(null);
        window.readout.hide();
      } else tell(event, best);
    });
    stage.addEventListener("pointerleave", () => { light(null); window.readout.hide(); });
  }
  for (const row of document.querySelectorAll("tr[data-run]")) {
    row.addEventListener("pointerenter", () => light(row.dataset.run));
    row.addEventListener("pointerleave", () => light(null));
  }
})();
