/* Draws the figures of a memguard report from the JSON beside it. It asks the network for nothing. */
"use strict";
(() => {
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const config = {
    displaylogo: false,
    responsive: true,
    showTips: false,
    modeBarButtons: [["zoom2d", "pan2d", "zoomIn2d", "zoomOut2d", "resetScale2d", "toImage"]],
  };
  const still = window.matchMedia("(prefers-reduced-motion: reduce)");
  const drawn = [];

  const size = (mib) => {
    if (mib === null || mib === undefined) return "unknown";
    return Math.abs(mib) >= 1024 ? `${(mib / 1024).toFixed(2)} GiB` : `${mib.toFixed(1)} MiB`;
  };

  /* Time since the start, in the unit that fits the length of the run. */
  const unit = (span) => {
    if (span < 600e3) return ["seconds", 1e3];
    if (span < 36000e3) return ["minutes", 60e3];
    return ["hours", 3600e3];
  };

  const hover = (trace, next) => {
    const label = trace.name;
    if (trace.meta.hover === "size") return trace.y.map((y) => `${label} ${size(y)}`);
    const name = label.replace(/ in use$/, "");
    return trace.y.map((y, at) => {
      const idle = next.y[at];
      const held = idle === null ? "held unknown" : `${size((y || 0) + idle)} held`;
      return `${name} ${held}, ${size(y)} in use`;
    });
  };

  /* Plotly fills an area across a gap. So a series with gaps is drawn as a line, and polygons beneath it. */
  const withGaps = (trace) => {
    const gap = (at) => trace.y[at] === null || trace.y[at] === undefined;
    if (!trace.y.includes(null)) return [trace];
    const x = [];
    const y = [];
    const sizes = trace.y.map((_, at) => (gap(at - 1) && gap(at + 1) ? 4 : 0));
    let from = -1;
    for (let at = 0; at <= trace.y.length; at += 1) {
      if (!gap(at) && from < 0) from = at;
      if (!gap(at) || from < 0) continue;
      x.push(trace.x[from], ...trace.x.slice(from, at), trace.x[at - 1], null);
      y.push(0, ...trace.y.slice(from, at), 0, null);
      from = -1;
    }
    const area = { ...trace, x, y, fill: "toself", hoverinfo: "skip", line: { width: 0 } };
    delete area.text;
    delete area.hovertemplate;
    const line = { ...trace, fill: "none" };
    if (sizes.some((one) => one)) {
      line.mode = "lines+markers";
      line.marker = { size: sizes, color: trace.line.color };
    }
    return [area, line];
  };

  const build = (spec) => {
    const [word, scale] = unit(spec.span);
    const at = (offset) => (spec.elapsed ? offset / scale : spec.begin + offset);
    const times = {};
    for (const [name, list] of Object.entries(spec.times)) times[name] = list.map(at);
    const axisOf = (trace) => spec.layout["yaxis" + trace.yaxis.slice(1)];
    const traces = spec.traces.flatMap((trace, number) => {
      const made = { ...trace, x: times[trace.x] };
      const how = trace.meta && trace.meta.hover;
      if (how) {
        made.text = hover(trace, spec.traces[number + 1]);
        made.hovertemplate = "%{text}<extra></extra>";
      }
      const per = axisOf(trace).unit;
      if (per) made.y = trace.y.map((y) => (y === null ? null : y / per));
      return made.fill === "tozeroy" ? withGaps(made) : [made];
    });
    const layout = {
      ...spec.layout,
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      font: { family: "system-ui, sans-serif", size: 12 },
      hovermode: "x unified",
      hoverlabel: { bgcolor: "#20242b", bordercolor: "#20242b", font: { color: "#fff", size: 12 }, align: "left" },
      dragmode: "zoom",
      modebar: { bgcolor: "rgba(0,0,0,0)", color: "#767676", activecolor: "#0b74d1" },
      showlegend: false,
      shapes: spec.layout.shapes.map((shape) => ({ ...shape, x0: at(shape.x0), x1: at(shape.x1) })),
      xaxis: {
        type: spec.elapsed ? "linear" : "date",
        range: [at(-spec.span * 0.005), at(spec.span * 1.005 || 1)],
        anchor: spec.last,
        title: { text: spec.elapsed ? `${word} since the start` : "time (UTC)", font: { size: 12 } },
        showspikes: true,
        spikemode: "across",
        spikethickness: 1,
        spikecolor: "#767676",
        spikedash: "solid",
        hoverformat: spec.elapsed ? ".3f" : "%Y-%m-%d %H:%M:%S.%L",
        ticks: "outside",
        zeroline: false,
      },
    };
    for (const key of Object.keys(layout).filter((name) => /^yaxis\d*$/.test(name))) {
      const { unit: per, ...axis } = layout[key];
      layout[key] = { ...axis, automargin: false };
      if (!per) continue;
      layout[key].range = axis.range.map((value) => value / per);
      layout[key].ticksuffix = per === 1024 ? " GiB" : " MiB";
      layout[key].rangemode = "tozero";
      layout[key].zeroline = true;
    }
    return [traces, layout];
  };

  const open = (number, move) => {
    const row = document.getElementById(`entry-${number}`);
    if (!row) return;
    const details = row.querySelector("details");
    if (details) details.open = true;
    if (!move) return;
    row.scrollIntoView({ block: "center", behavior: still.matches ? "auto" : "smooth" });
    (row.querySelector("summary") || row).focus({ preventScroll: true });
  };

  let following = false;
  const follow = (from, change) => {
    const keys = ["xaxis.range[0]", "xaxis.range[1]", "xaxis.range", "xaxis.autorange"];
    const moved = Object.fromEntries(Object.entries(change).filter(([key]) => keys.includes(key)));
    if (following || !Object.keys(moved).length) return;
    following = true;
    const others = drawn.filter((plot) => plot !== from && plot.dataset.gpu === from.dataset.gpu);
    Promise.all(others.map((plot) => window.Plotly.relayout(plot, moved))).finally(() => {
      following = false;
    });
  };

  const hidden = new Set();
  const show = (plot) => {
    const at = [];
    const visible = [];
    plot.data.forEach((trace, number) => {
      if (!trace.meta || !trace.meta.framework) return;
      at.push(number);
      visible.push(!hidden.has(trace.meta.framework));
    });
    return window.Plotly.restyle(plot, { visible }, at);
  };

  const draw = (plot) => {
    if (plot.dataset.drawn) return;
    plot.dataset.drawn = "begun";
    const [traces, layout] = build(figures[plot.dataset.figure]);
    drawn.push(plot);
    window.Plotly.newPlot(plot, traces, layout, config).then(() => {
      plot.dataset.drawn = "yes";
      window.performance.mark("memguard-drawn");
      plot.on("plotly_click", (event) => {
        const markers = event.points.filter((point) => point.data.meta && point.data.meta.lane);
        const top = plot.getBoundingClientRect().top;
        const away = ({ yaxis, y }) => Math.abs(top + yaxis._offset + yaxis.d2p(y) - event.event.clientY);
        markers.sort((one, other) => away(one) - away(other));
        if (markers.length) open(markers[0].customdata, true);
      });
      plot.on("plotly_relayout", (change) => follow(plot, change));
      if (hidden.size) show(plot);
    });
  };

  const plots = [...document.querySelectorAll(".plot")];
  const near = new IntersectionObserver(
    (seen) => seen.filter((one) => one.isIntersecting).forEach((one) => draw(one.target)),
    { rootMargin: "600px" },
  );
  plots.forEach((plot) => near.observe(plot));

  for (const box of document.querySelectorAll("input[data-framework]")) {
    box.addEventListener("change", () => {
      const name = box.dataset.framework;
      if (box.checked) hidden.delete(name);
      else hidden.add(name);
      for (const other of document.querySelectorAll("input[data-framework]")) {
        if (other.dataset.framework === name) other.checked = box.checked;
      }
      drawn.forEach(show);
    });
  }
  for (const button of document.querySelectorAll("button[data-reset]")) {
    button.hidden = false;
    button.addEventListener("click", () => {
      for (const plot of drawn.filter((one) => one.dataset.gpu === button.dataset.reset)) {
        const layout = build(figures[plot.dataset.figure])[1];
        const ranges = Object.keys(layout).filter((key) => /^[xy]axis\d*$/.test(key));
        window.Plotly.relayout(plot, Object.fromEntries(ranges.map((key) => [`${key}.range`, layout[key].range])));
      }
    });
  }
  const closed = [];
  window.addEventListener("beforeprint", () => {
    plots.forEach(draw);
    for (const plot of drawn) window.Plotly.relayout(plot, { width: 960 });
    for (const details of document.querySelectorAll(".serious details:not([open])")) {
      details.open = true;
      closed.push(details);
    }
  });
  window.addEventListener("afterprint", () => {
    for (const details of closed.splice(0)) details.open = false;
    for (const plot of drawn) window.Plotly.relayout(plot, { autosize: true, width: null });
  });
})();
