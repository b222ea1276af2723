// Draws the charts of a report page, follows light and dark, copies tables, sorts and filters the index of runs.
(async () => {
  "use strict";
  const byId = (id) => document.getElementById(id);
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  async function inflate(id) {
    const bytes = Uint8Array.from(atob(byId(id).textContent.trim()), (c) => c.charCodeAt(0));
    return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
  }

  async function copy(text, button) {
    try {
      await navigator.clipboard.writeText(text);
    } catch {  // a browser that gives files no clipboard
      const area = document.createElement("textarea");
      area.value = text;
      document.body.append(area);
      area.select();
      document.execCommand("copy");
      area.remove();
    }
    const label = button.textContent;
    button.textContent = "Copied";
    setTimeout(() => { button.textContent = label; }, 1500);
  }

  const tsv = (table) => [...table.rows].filter((row) => !row.hidden).map((row) =>
    [...row.cells].map((cell) => cell.dataset.value ?? cell.textContent.trim().replace(/\s+/g, " ")).join("\t")
  ).join("\n");

  document.addEventListener("click", async (event) => {
    const button = event.target.closest("button[data-copies]");
    if (!button) return;
    const source = byId(button.dataset.copies);
    const text = source.tagName === "TABLE" ? tsv(source)
      : source.tagName === "SCRIPT" ? await inflate(source.id) : source.textContent;
    await copy(text, button);
  });

  for (const table of document.querySelectorAll("table.sortable")) {
    const heads = [...table.tHead.rows[0].cells];
    const value = (row, i) => row.cells[i].dataset.value ?? row.cells[i].textContent.trim();
    heads.forEach((head, i) => head.addEventListener("click", () => {
      const up = head.getAttribute("aria-sort") !== "ascending";
      heads.forEach((other) => other.setAttribute("aria-sort", "none"));
      head.setAttribute("aria-sort", up ? "ascending" : "descending");
      const rows = [...table.tBodies[0].rows];
      rows.sort((a, b) => {
        const [x, y] = [value(a, i), value(b, i)];
        if (x === "" || y === "") return (x === "") - (y === "");  // unknown comes last both ways
        const order = isNaN(x) || isNaN(y) ? x.localeCompare(y) : x - y;
        return up ? order : -order;
      });
      table.tBodies[0].append(...rows);
    }));
    const filters = [...document.querySelectorAll("[data-filters]")];
    const apply = () => {
      let shown = 0;
      for (const row of table.tBodies[0].rows) {
        row.hidden = !filters.every((filter) => {
          const wanted = filter.value.trim().toLowerCase();
          const column = filter.dataset.filters;
          if (!wanted) return true;
          return column === "" ? row.textContent.toLowerCase().includes(wanted)
            : row.cells[Number(column)].textContent.trim().toLowerCase() === wanted;
        });
        shown += !row.hidden;
      }
      byId("shown").textContent = `${shown} of ${table.tBodies[0].rows.length} runs`;
    };
    filters.forEach((filter) => filter.addEventListener("input", apply));
  }

  const template = (paper) => {
    const ink = paper ? "#1c2330" : colour("--ink");
    const soft = paper ? "#59626f" : colour("--soft");
    const line = paper ? "#d5d9e0" : colour("--line");
    const axis = {
      gridcolor: line, zerolinecolor: line, linecolor: soft, tickcolor: soft, automargin: true, ticks: "outside",
      title: { standoff: 8, font: { size: 12, color: soft } }, tickfont: { size: 11.5, color: soft },
    };
    return { layout: {
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", xaxis: axis, yaxis: axis,
      font: { family: getComputedStyle(document.body).fontFamily, size: 12, color: ink },
      margin: { l: 8, r: 12, t: 8, b: 8 },
      legend: { orientation: "h", y: -0.24, x: 0, font: { size: 11.5 } },
      hoverlabel: { align: "left", font: { family: getComputedStyle(document.body).fontFamily } },
      annotationdefaults: { font: { size: 11, color: soft }, showarrow: false },
      shapedefaults: { line: { color: soft } },
    } };
  };

  const charts = byId("charts") ? JSON.parse(byId("charts").textContent) : [];
  const plots = charts.map((chart) => byId(`plot-${chart.name}`));
  if (charts.length) {
    try {
      const library = document.createElement("script");
      library.textContent = await inflate("library");
      document.head.append(library);
      byId("library").remove();
    } catch {
      for (const plot of plots) {
        plot.classList.add("missing");
        plot.textContent = "This chart needs a browser of 2023 or later, with scripts on. The tables have its figures.";
      }
      return;
    }
  }
  for (const [i, chart] of charts.entries()) {
    await Plotly.newPlot(plots[i], chart.traces, { ...chart.layout, template: template(false) },
      { responsive: true, displaylogo: false, modeBarButtonsToRemove: ["select2d", "lasso2d"] });
    await new Promise((done) => { setTimeout(done); });  // shows it before the next one is drawn
  }
  const theme = (paper) => Promise.all(plots.map((plot) => Plotly.relayout(plot, { template: template(paper) })));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => theme(false));
  addEventListener("beforeprint", () => theme(true));
  addEventListener("afterprint", () => theme(false));
  document.documentElement.dataset.charts = String(charts.length);
})();
