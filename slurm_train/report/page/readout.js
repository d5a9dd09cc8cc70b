// What follows the pointer over a plot: the nearest point of each curve, in words.
(() => {
  "use strict";
  const box = document.getElementById("readout");

  const format = (value) => {
    if (value === 0) return "0";
    const size = Math.abs(value);
    if (size >= 1e6 || size < 1e-4) return value.toExponential(3);
    if (Number.isInteger(value)) return value.toLocaleString("en-US");
    return size >= 1e4 ? Math.round(value).toLocaleString("en-US") : String(Number(value.toPrecision(5)));
  };

  const nearest = (xs, x) => {
    let low = 0, high = xs.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (xs[middle] > x) high = middle; else low = middle;
    }
    return Math.abs(xs[low] - x) <= Math.abs(xs[high] - x) ? low : high;
  };

  const line = (name, value, colour) => {
    const row = document.createElement("div");
    const left = document.createElement("span"), right = document.createElement("span");
    if (colour) {
      const key = document.createElement("i");
      key.className = "key " + colour;
      left.append(key);
    }
    left.append(name);
    right.append(value);
    row.append(left, right);
    return row;
  };

  const place = (event) => {
    const gap = 16, size = box.getBoundingClientRect();
    const left = event.clientX + gap + size.width > innerWidth ? event.clientX - gap - size.width : event.clientX + gap;
    box.style.left = Math.max(4, left) + "px";
    box.style.top = Math.max(4, Math.min(event.clientY + gap, innerHeight - size.height - 4)) + "px";
  };

  window.readout = {
    line,
    show(event, rows) {
      box.replaceChildren(...rows);
      box.hidden = false;
      place(event);
    },
    hide() { box.hidden = true; },
  };

  const at = (frame, axis, value) => {
    const data = frame.dataset;
    const low = Number(axis === "x" ? data.xlow : data.low), high = Number(axis === "x" ? data.xhigh : data.high);
    if (axis === "y" && data.log === "1") return Math.log(value / low) / Math.log(high / low);
    return (value - low) / (high - low);
  };

  // Of many curves, the one that passes nearest to the pointer.
  const pick = (frame, found, up) => {
    let best = null, least = Infinity;
    for (const [curve, index] of found) {
      if (curve.key && window.sweep && window.sweep.isOff(curve.key)) continue;
      const away = Math.abs(at(frame, "y", curve.y[index]) - up);
      if (away < least) [best, least] = [[curve, index], away];
    }
    return best === null ? [] : [best];
  };

  const wire = (frame, points) => {
    const area = frame.querySelector(".area");
    let added = [];
    const clear = () => { added.forEach((one) => one.remove()); added = []; };
    const add = (css, left, top) => {
      const one = document.createElement("div");
      one.className = css;
      one.style.left = 100 * left + "%";
      if (top !== undefined) one.style.top = 100 * (1 - Math.min(1, Math.max(0, top))) + "%";
      area.append(one);
      added.push(one);
    };
    const follow = (event) => {
      const size = area.getBoundingClientRect();
      const share = Math.min(1, Math.max(0, (event.clientX - size.left) / size.width));
      const low = Number(frame.dataset.xlow), high = Number(frame.dataset.xhigh);
      const x = low + share * (high - low);
      clear();
      let found = points.curves.map((curve) => [curve, nearest(curve.x, x)]);
      if (points.isMany) {
        found = pick(frame, found, 1 - (event.clientY - size.top) / size.height);
        if (window.sweep) window.sweep.light(found.length ? found[0][0].key || null : null);
        if (!found.length) return;
      }
      // The curve with the nearest point says where the line stands; curves that end elsewhere stay silent.
      const anchor = found.map(([curve, index]) => curve.x[index])
        .reduce((best, one) => Math.abs(one - x) < Math.abs(best - x) ? one : best);
      const reach = Math.max(Math.abs(high - low) / 50, 1e-12);
      const label = found.map(([curve, index]) => curve.labels && curve.labels[index]).find(Boolean);
      const rows = [line(points.x, format(anchor) + (label ? ", " + label : ""))];
      add("cross", at(frame, "x", anchor));
      for (const [curve, index] of found) {
        if (Math.abs(curve.x[index] - anchor) > reach) continue;
        const band = curve.low ? " (" + format(curve.low[index]) + " to " + format(curve.high[index]) + ")" : "";
        const unit = points.unit ? " " + points.unit : "";
        const where = curve.x[index] === anchor ? "" : " at " + format(curve.x[index]);
        rows.push(line(curve.name, format(curve.y[index]) + unit + band + where, curve.colour + " " + curve.kind));
        add("spot " + curve.colour, at(frame, "x", curve.x[index]), at(frame, "y", curve.y[index]));
      }
      window.readout.show(event, rows);
    };
    area.addEventListener("pointermove", follow);
    area.addEventListener("pointerdown", follow);
    area.addEventListener("pointerleave", () => { 
      clear();
      window.readout.hide();
      if (window.sweep) window.sweep.light(null);
    });
  };

  for (const figure of document.querySelectorAll("figure.plot")) {
    const data = figure.querySelector("script[type='application/json']");
    if (data) figure.querySelectorAll(".frame").forEach((frame) => wire(frame, JSON.parse(data.textContent)));
  }
})();
