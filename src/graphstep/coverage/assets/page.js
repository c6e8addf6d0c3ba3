"use strict";
(() => {
  const all = (selector, within = document) => Array.from(within.querySelectorAll(selector));
  const byId = (id) => document.getElementById(id);

  // ----- light and dark

  const root = document.documentElement;
  const prefersDark = matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (root.dataset.theme || (prefersDark.matches ? "dark" : "light")) === "dark";
  const themeButton = byId("theme");
  const showTheme = () => {
    themeButton.textContent = isDark() ? "light" : "dark";
    themeButton.setAttribute("aria-label", `switch to ${themeButton.textContent} colours`);
    drawAll();
  };
  themeButton.hidden = false;
  themeButton.addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    showTheme();
  });
  prefersDark.addEventListener("change", showTheme);

  // ----- the tree

  const items = all(".tree li");
  const find = byId("tree-find");
  const show = byId("tree-show");
  const filter = () => {
    const wanted = find.value.trim().toLowerCase();
    const state = show.value;
    const isOff = wanted === "" && state === "";
    let count = 0;
    const kept = new Set();
    for (const item of items) {
      const fits = item.dataset.path.toLowerCase().includes(wanted) && (state === "" || item.dataset.state === state);
      if (!fits) continue;
      count += 1;
      for (let up = item; up !== null; up = up.parentElement.closest("li")) kept.add(up);
    }
    for (const item of items) {
      item.hidden = !isOff && !kept.has(item);
      const inner = item.querySelector(":scope > details");
      if (!isOff && inner !== null && kept.has(item)) inner.open = true;
    }
    byId("tree-count").textContent = isOff ? "" : `${count} of ${items.length}`;
  };
  byId("tree-tools").hidden = false;
  find.addEventListener("input", filter);
  show.addEventListener("change", filter);
  for (const button of all("#tree-tools [data-open]")) {
    button.addEventListener("click", () => {
      for (const each of all(".tree details")) each.open = button.dataset.open === "1";
    });
  }

  // ----- timelines: one range of time for all of them, in microseconds

  const timelines = JSON.parse(byId("timelines").textContent);
  const canvases = all("canvas.timeline");
  const rowHeight = 34;
  const endOf = (timeline) => Math.max(1, ...timeline.tracks.map((track) => {
    let end = 0;
    for (const span of track.spans) end = Math.max(end, span[0] + span[1]);
    return end;
  }));
  const whole = Math.max(1, ...Object.values(timelines).map(endOf));
  const range = { start: 0, end: whole };

  const colourOf = (category) => {
    const style = getComputedStyle(root);
    const name = {
      "graph launch": "--captured", launch: "--eager", transfer: "--partly", operation: "--blue",
      kernel: "--blue", copy: "--violet",
    }[category] || "--grey";
    return style.getPropertyValue(name).trim();
  };

  const draw = (canvas) => {
    const timeline = timelines[canvas.dataset.timeline];
    const scale = devicePixelRatio || 1;
    const width = Math.max(1, canvas.clientWidth);
    const height = timeline.tracks.length * rowHeight + 20;
    canvas.style.height = `${height}px`;
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(height * scale);
    const pen = canvas.getContext("2d");
    pen.setTransform(scale, 0, 0, scale, 0, 0);
    pen.clearRect(0, 0, width, height);
    const style = getComputedStyle(root);
    const perMicrosecond = width / (range.end - range.start);
    const colours = timeline.categories.map(colourOf);
    let num = 0;
    timeline.tracks.forEach((track, row) => {
      const top = row * rowHeight + 15;
      for (const [start, duration, , category] of track.spans) {
        if (start + duration < range.start || start > range.end) continue;
        pen.fillStyle = colours[category];
        const left = (start - range.start) * perMicrosecond;
        pen.fillRect(left, top, Math.max(0.6, duration * perMicrosecond), rowHeight - 18);
        num += 1;
      }
      pen.fillStyle = style.getPropertyValue("--text").trim();
      pen.font = "11px system-ui, sans-serif";
      pen.fillText(track.name, 4, top - 3);
    });
    pen.fillStyle = style.getPropertyValue("--quiet").trim();
    for (let mark = 0; mark <= 4; mark += 1) {
      const text = `${((range.start + (mark / 4) * (range.end - range.start)) / 1000).toFixed(2)} ms`;
      const at = (mark / 4) * width;
      pen.fillText(text, Math.min(Math.max(2, at - 20), width - 60), height - 5);
    }
    canvas.dataset.drawn = String(num);
  };

  const drawAll = () => {
    for (const canvas of canvases) draw(canvas);
    for (const swatch of all(".swatch")) swatch.style.background = colourOf(swatch.dataset.category);
    const out = byId("timeline-range");
    if (out !== null) out.textContent = `${(range.start / 1000).toFixed(3)} to ${(range.end / 1000).toFixed(3)} ms`;
  };

  const setRange = (start, length) => {
    const kept = Math.min(whole, Math.max(1, length));
    range.start = Math.min(Math.max(0, start), whole - kept);
    range.end = range.start + kept;
    drawAll();
  };
  const zoom = (factor, at) => {
    const length = range.end - range.start;
    const middle = at === undefined ? range.start + length / 2 : at;
    setRange(middle - ((middle - range.start) / factor), length / factor);
  };
  const move = (share) => setRange(range.start + share * (range.end - range.start), range.end - range.start);

  const timeAt = (canvas, event) => {
    const box = canvas.getBoundingClientRect();
    return range.start + ((event.clientX - box.left) / box.width) * (range.end - range.start);
  };
  const tell = (canvas, event) => {
    const timeline = timelines[canvas.dataset.timeline];
    const box = canvas.getBoundingClientRect();
    const track = timeline.tracks[Math.floor((event.clientY - box.top) / rowHeight)];
    if (track === undefined) return;
    const time = timeAt(canvas, event);
    const near = (2 * (range.end - range.start)) / box.width;
    const found = track.spans.find(([start, duration]) => start - near <= time && time <= start + duration + near);
    if (found === undefined) return;
    const [start, duration, name, category] = found;
    byId("timeline-detail").textContent =
      `${track.name}, ${timeline.categories[category]}: ${timeline.names[name]}, ` +
      `${duration.toFixed(1)} us at ${(start / 1000).toFixed(3)} ms`;
  };

  for (const canvas of canvases) {
    let held = null;
    canvas.addEventListener("wheel", (event) => {
      if (!event.ctrlKey && !event.shiftKey) return; // The page keeps scrolling.
      event.preventDefault();
      zoom(event.deltaY < 0 ? 1.5 : 1 / 1.5, timeAt(canvas, event));
    }, { passive: false });
    canvas.addEventListener("pointerdown", (event) => { held = event.clientX; });
    canvas.addEventListener("pointerup", () => { held = null; });
    canvas.addEventListener("pointerleave", () => { held = null; });
    canvas.addEventListener("pointermove", (event) => {
      if (held !== null) {
        move((held - event.clientX) / canvas.clientWidth);
        held = event.clientX;
      }
      tell(canvas, event);
    });
    canvas.addEventListener("keydown", (event) => {
      const action = {
        "+": () => zoom(2), "=": () => zoom(2), "-": () => zoom(0.5), 0: () => setRange(0, whole),
        ArrowLeft: () => move(-0.25), ArrowRight: () => move(0.25),
      }[event.key];
      if (action === undefined) return;
      event.preventDefault();
      action();
    });
  }
  const tools = byId("timeline-tools");
  if (tools !== null) {
    tools.hidden = false;
    tools.addEventListener("click", (event) => {
      const button = event.target.closest("button");
      if (button === null) return;
      if (button.dataset.zoom) zoom(Number(button.dataset.zoom));
      if (button.dataset.move) move(Number(button.dataset.move));
      if (button.dataset.reset) setRange(0, whole);
    });
  }
  addEventListener("resize", drawAll);
  showTheme();
  root.dataset.ready = "yes";
})();
