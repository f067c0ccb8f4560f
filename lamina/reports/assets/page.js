"use strict";
// Draws the page's figures, folded ones when they are opened, in the scheme of the system; saves figures and tables.
(() => {
  const DARK = {
    "#fff": "#14181d", "#1f2933": "#e3e8ee", "#66717d": "#a7b1bc", "#edf0f3": "#262c34", "#c9d0d8": "#4a545f",
    "#000000": "#f2f4f6", "#332288": "#9b8ff0", "#661100": "#d97757", "#882255": "#c94f7c", "#0072b2": "#5a82f0",
    "#117733": "#4fb173", "#aa4499": "#d67fc8", "#009e73": "#2fc497", "#d55e00": "#f06a3a", "#e69f00": "#f7c64a", "#aa7744": "#cf9d6b",
    "#b3261e": "#f2827a", "#3d6fb4": "#7fa8e8", "#c98f1e": "#e2b04a", "#b9bcc2": "#5b626c",
    "#6b7280": "#9aa3b0", "#4477aa": "#7aa9d8", "#444444": "#b5bdc6", "#333333": "#c3cad2",
  };
  const TYPES = {
    f8: Float64Array, f4: Float32Array, i4: Int32Array, u4: Uint32Array,
    i2: Int16Array, u2: Uint16Array, i1: Int8Array, u1: Uint8Array,
  };
  const scheme = matchMedia("(prefers-color-scheme: dark)");
  const inScheme = (text) =>
    scheme.matches ? text.replace(/#[0-9a-f]{6}\b|#fff\b/gi, (color) => DARK[color.toLowerCase()] || color) : text;
  const styled = [...document.querySelectorAll("main [style*='#']:not(.drawing *)")]
    .map((node) => [node, node.getAttribute("style")]); // a diagram stays on white
  const divs = [...document.querySelectorAll(".plotly-graph-div")];
  const drawn = new Map(); // a drawn figure's place: its text
  let library = null;

  const bytes = (text) => Uint8Array.from(atob(text), (c) => c.charCodeAt(0));

  // The text of an element that holds it gzipped, as base64.
  const unpacked = (node) =>
    new Response(new Blob([bytes(node.textContent)]).stream().pipeThrough(new DecompressionStream("gzip"))).text();

  function loaded() {
    library ??= unpacked(document.getElementById("plotly")).then((text) => {
      const script = document.createElement("script");
      script.textContent = text;
      document.head.append(script);
    });
    return library;
  }

  async function draw(div) {
    if (!drawn.has(div)) {
      const text = await unpacked(div.nextElementSibling);
      if (drawn.has(div)) return; // another call came first
      drawn.set(div, text);
      figureTools(div);
    }
    await loaded();
    const { data, layout } = figureOf(div, inScheme(drawn.get(div)));
    layout.autosize = true;
    stack(layout, panelsOf(data, layout), Math.max(1, Math.floor(div.clientWidth / (data.some(isMap) ? 170 : 300))));
    div.style.height = `${layout.height}px`;
    await Plotly.react(div, data, layout, { displayModeBar: false, responsive: true });
    const taken = div._fullLayout._size.t - layout.margin.t; // by the rows of a legend that found no place in one
    if (taken < 1) return;
    div.style.height = `${layout.height + taken}px`;
    await Plotly.relayout(div, { height: layout.height + taken });
  }

  // The panels of a figure, row by row from the top.
  function panelsOf(data, layout) {
    const pairs = new Map(data.map((trace) => [`${trace.xaxis} ${trace.yaxis}`, trace]));
    const panels = [...pairs.values()].map((trace) => {
      const [x, y] = ["x", "y"].map((letter) => axisOf(layout, trace, letter));
      const [[left], [bottom, top]] = [x.domain || [0, 1], y.domain || [0, 1]];
      return { x, y, left, top, share: top - bottom, title: titleAbove(layout, x, y) };
    });
    return panels.sort((a, b) => b.top - a.top || a.left - b.left);
  }

  // Panels in fewer columns where a row of them is too narrow, each as high as it was, with ticks and titles of its own.
  function stack(layout, panels, across) {
    if (panels.filter(({ top }) => top === panels[0].top).length <= across) return;
    const [inside, gutter] = [layout.height - layout.margin.t - layout.margin.b, 0.06];
    const height = inside * Math.max(...panels.map(({ share }) => share));
    const gap = panels.some(({ title }) => title?.text.includes("<br>")) ? 98 : 82;
    const rows = Math.ceil(panels.length / across);
    const [all, width] = [rows * height + (rows - 1) * gap, (1 - (across - 1) * gutter) / across];
    const below = ({ left }) => panels.findLast((each) => each.left === left && each.x.title?.text)?.x.title;
    const beside = ({ top }) => panels.find((each) => each.top === top && each.y.title?.text)?.y.title;
    const own = (axis) => (axis.title?.text ? axis.title : null);
    const titles = panels.map((panel) => ({ x: own(panel.x) || below(panel) || {}, y: own(panel.y) || beside(panel) || {} }));
    const shared = panels.some(({ y }) => y.showticklabels === false);
    panels.forEach(({ x, y, title }, i) => {
      const [left, top] = [(i % across) * (width + gutter), 1 - (Math.floor(i / across) * (height + gap)) / all];
      Object.assign(x, { domain: [left, left + width], showticklabels: true, title: titles[i].x });
      Object.assign(y, { domain: [Math.max(0, top - height / all), top] });
      if (i % across === 0) Object.assign(y, { showticklabels: true, title: titles[i].y });
      else if (shared) Object.assign(y, { showticklabels: false, title: {} });
      if (title) Object.assign(title, { x: left + width / 2, y: top });
    });
    const bar = layout.coloraxis?.colorbar;
    if (bar) Object.assign(bar, { lenmode: "pixels", len: Math.min(300, all), y: 1, yanchor: "top" });
    if (layout.legend?.y) layout.legend.y = 1 + ((layout.legend.y - 1) * inside) / all;
    layout.height += all - inside;
  }

  // A figure as it is shown: against tokens, or what its reader chose.
  function figureOf(div, text) {
    const { data, layout } = JSON.parse(text);
    if (div.dataset.against) rescale(data, layout, Number(div.dataset.against));
    return { data, layout };
  }

  // A figure's x values are in units that a factor per line turns into others: tokens into FLOPs or seconds.
  function rescale(data, layout, number) {
    const unit = layout.meta.against[number];
    data.forEach((trace, i) => {
      trace.x = values(trace.x).map((x) => x * unit.factors[i]);
    });
    layout.xaxis.title = { ...layout.xaxis.title, text: unit.name };
  }

  function values(given) {
    if (!given || given.bdata === undefined) return [...(given || [])];
    const exact = [...new TYPES[given.dtype](bytes(given.bdata).buffer)];
    const flat = given.dtype === "f4" ? exact.map((x) => rounded(x)) : exact; // 2.38, not 2.380000114440918
    if (!given.shape) return flat;
    const width = Number(String(given.shape).split(",")[1]);
    return Array.from({ length: flat.length / width }, (_, row) => flat.slice(row * width, (row + 1) * width));
  }

  const rounded = (number) => (Number.isInteger(number) ? number : Number(number.toPrecision(7)));

  function button(text, title, act) {
    const made = document.createElement("button");
    Object.assign(made, { type: "button", textContent: text, title, onclick: act });
    made.setAttribute("aria-label", title);
    return made;
  }

  function save(name, text, type) {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([text], { type }));
    link.download = name;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  }

  const plain = (given) => {
    const html = String(given).replaceAll("<br>", " ");
    return /[<&]/.test(html) ? new DOMParser().parseFromString(html, "text/html").body.textContent : html;
  };
  const cell = (value) => (/[",\n]/.test(value) ? `"${value.replaceAll('"', '""')}"` : value);
  const fileName = (node) => {
    const heading = node.closest("figure")?.querySelector("h3") || node.closest("section")?.querySelector("h2");
    return (heading?.textContent || "lamina").trim().toLowerCase().replace(/[^a-z0-9]+/g, "-");
  };

  const axisOf = (layout, trace, letter) => layout[`${letter}axis${(trace[`${letter}axis`] || letter).slice(1)}`] || {};
  const isMap = (trace) => trace.type === "heatmap";

  // What an axis counts, if all panels count the same.
  function counted(data, layout, letter) {
    const titles = new Set(data.map((trace) => axisOf(layout, trace, letter).title?.text).filter(Boolean));
    return titles.size === 1 ? plain([...titles][0]) : letter;
  }

  // The annotation that is the title above a panel.
  const titleAbove = (layout, across, up) =>
    (layout.annotations || []).find((each) => each.xref === "paper" && each.yref === "paper" && across.domain
      && across.domain[0] <= each.x && each.x <= across.domain[1] && Math.abs(each.y - up.domain[1]) < 1e-6);

  // The title above a trace's panel; without one, what its y axis counts where the panels differ in that.
  function panelOf(data, layout, trace) {
    const [across, up] = ["x", "y"].map((letter) => axisOf(layout, trace, letter));
    return plain(titleAbove(layout, across, up)?.text ?? (counted(data, layout, "y") === "y" ? up.title?.text : null) ?? "");
  }

  // The rows of a map: the values themselves, where the colors are of logarithms or of a row stretched to its range.
  function mapRows(trace) {
    const [xs, ys, zs] = [trace.x, trace.y, trace.customdata ?? trace.z].map(values);
    const value = (z) => (trace.meta?.log10 && Number.isFinite(z) ? rounded(10 ** z) : z);
    return zs.flatMap((line, i) => values(line).map((z, j) => [xs[j] ?? j, ys[i] ?? i, value(z)]));
  }

  // The rows of a line: its points with the ends of their band or error bars, and what is written at them.
  function lineRows(trace, band) {
    const [xs, ys] = [trace.x, trace.y].map(values);
    if (trace.cliponaxis === false) return values(trace.customdata).map(([x, ended]) => [x, "", "", "", ended]); // no y
    const above = values(trace.error_y?.array);
    const below = values(trace.error_y?.arrayminus ?? trace.error_y?.array);
    const ends = new Map();
    const place = (x) => (typeof x === "number" ? rounded(x) : x);
    if (band) {
      const [x, y] = [band.x, band.y].map(values);
      x.slice(0, x.length / 2).forEach((at, i) => ends.set(place(at), [y[y.length - 1 - i], y[i]]));
    }
    const notes = trace.meta?.notes ?? trace.text ?? [];
    return ys.map((y, i) => {
      const [low, high] = ends.get(place(xs[i])) ?? (above.length ? [rounded(y - below[i]), rounded(y + above[i])] : []);
      return [xs[i] ?? i, y, low, high, notes[i]];
    });
  }

  function csv(div) {
    const { data, layout } = figureOf(div, drawn.get(div));
    const map = data.find(isMap);
    const quantity = (map?.coloraxis ? layout.coloraxis : map)?.colorbar?.title?.text;
    const more = map ? [plain(quantity || "value")] : ["low", "high", "note"];
    const rows = [["panel", "line", counted(data, layout, "x"), counted(data, layout, "y"), ...more]];
    let band = null;
    for (const trace of data) {
      if (trace.fill === "toself") {
        band = trace; // of the line that follows
        continue;
      }
      const head = [panelOf(data, layout, trace), trace.meta?.line ?? trace.name ?? ""];
      for (const row of isMap(trace) ? mapRows(trace) : lineRows(trace, band)) rows.push([...head, ...row]);
      band = null;
    }
    const text = (each) => (each == null || Number.isNaN(each) ? "" : plain(each));
    return rows.map((row) => row.map((each) => cell(text(each))).join(",")).join("\n") + "\n";
  }

  function figureTools(div) {
    const bar = document.createElement("div");
    bar.className = "tools";
    const meta = JSON.parse(drawn.get(div)).layout.meta;
    (meta?.against || []).forEach((unit, i) => {
      const chosen = button(unit.label, `Draw against ${unit.name}`, () => {
        div.dataset.against = i;
        bar.querySelectorAll("[aria-pressed]").forEach((each) => each.setAttribute("aria-pressed", each === chosen));
        draw(div);
      });
      chosen.setAttribute("aria-pressed", i === 0);
      bar.append(chosen);
    });
    const gap = document.createElement("span");
    gap.className = "gap";
    bar.append(gap);
    const picture = (format) => () =>
      Plotly.downloadImage(div, {
        format, filename: fileName(div), width: div.offsetWidth, height: div.offsetHeight, scale: format === "png" ? 2 : 1,
      });
    bar.append(
      button("SVG", "Save this figure as SVG", picture("svg")),
      button("PNG", "Save this figure as PNG", picture("png")),
      button("PDF", "Print this figure alone; choose Save as PDF", () => printed(div)),
      button("CSV", "Save this figure's data as CSV", () => save(`${fileName(div)}.csv`, csv(div), "text/csv")),
    );
    (div.closest("figure") || div.parentElement).append(bar);
  }

  function printed(div) {
    const figure = div.closest("figure") || div.parentElement;
    for (let node = figure; node; node = node.parentElement) node.classList.add("printed");
    figure.classList.add("printed-alone");
    addEventListener("afterprint", () => {
      document.querySelectorAll(".printed").forEach((node) => node.classList.remove("printed", "printed-alone"));
    }, { once: true });
    print();
  }

  const texts = (table) =>
    [...table.rows].map((row) => [...row.cells].map((each) => each.innerText.replace(/\s+/g, " ").trim()));
  const tex = (text) => text.replace(/[\\{}$&#_%~^]/g, (c) => (c === "\\" ? "\\textbackslash{}" : c === "~" || c === "^" ? `\\${c}{}` : `\\${c}`))
    .replaceAll("±", "$\\pm$").replaceAll("–", "--");
  const FORMS = {
    CSV: ["csv", (rows) => rows.map((row) => row.map(cell).join(","))],
    Markdown: ["md", ([head, ...rows]) => [head, head.map(() => "---"), ...rows]
      .map((row) => `| ${row.map((each) => each.replaceAll("|", "\\|")).join(" | ")} |`)],
    LaTeX: ["tex", ([head, ...rows]) => [`\\begin{tabular}{${"l".repeat(head.length)}}`, "\\hline",
      `${head.map(tex).join(" & ")} \\\\`, "\\hline", ...rows.map((row) => `${row.map(tex).join(" & ")} \\\\`),
      "\\hline", "\\end{tabular}"]],
  };
  document.querySelectorAll(".scroll > table").forEach((table) => {
    const bar = document.createElement("div");
    bar.className = "tools";
    for (const [name, [ending, lines]] of Object.entries(FORMS)) {
      bar.append(button(name, `Save this table as ${name}`, () =>
        save(`${fileName(table)}.${ending}`, lines(texts(table)).join("\n") + "\n", "text/plain")));
    }
    table.parentElement.after(bar);
  });

  function recolor() {
    styled.forEach(([node, style]) => node.setAttribute("style", inScheme(style)));
    for (const div of drawn.keys()) draw(div);
  }
  scheme.addEventListener("change", recolor);
  recolor();
  document.querySelectorAll(".scroll").forEach((box) => box.setAttribute("tabindex", "0"));
  const shown = () => divs.filter((div) => div.offsetParent && !drawn.has(div));
  async function drawShown() {
    for (const div of shown()) await draw(div); // one after the other, from the top
    document.documentElement.dataset.ready = "yes";
  }
  document.querySelectorAll("details").forEach((part) => part.addEventListener("toggle", drawShown));
  addEventListener("beforeprint", drawShown);
  let resized = 0;
  addEventListener("resize", () => {
    clearTimeout(resized);
    resized = setTimeout(() => [...drawn.keys()].filter((div) => div.offsetParent).forEach(draw), 200);
  });
  drawShown();
})();
