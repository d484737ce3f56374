// What a pointer is told, what a legend hides, what is opened for the printer. The page is whole
// without this.
"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const tip = document.getElementById("tip");

  const place = (event) => {
    tip.style.display = "block";
    const box = tip.getBoundingClientRect();
    const right = event.clientX + 16 + box.width < window.innerWidth;
    const below = event.clientY + 16 + box.height < window.innerHeight;
    tip.style.left = (right ? event.clientX + 16 : Math.max(4, event.clientX - 12 - box.width)) + "px";
    tip.style.top = (below ? event.clientY + 16 : Math.max(4, event.clientY - 12 - box.height)) + "px";
  };
  const hide = () => {
    tip.style.display = "none";
    document.querySelectorAll(".cross").forEach((line) => (line.style.visibility = "hidden"));
  };

  const nearest = (values, wanted) => {
    let low = 0, high = values.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (values[middle] < wanted) low = middle; else high = middle;
    }
    return Math.abs(values[low] - wanted) <= Math.abs(values[high] - wanted) ? low : high;
  };
  const figure = (value) =>
    Math.abs(value) >= 100 ? Math.round(value).toLocaleString("en") : String(Number(value.toPrecision(3)));

  const readings = (chart, step) => {
    const rows = [];
    for (const line of chart.lines) {
      if (hidden.has(line.g) || !line.x.length) continue;
      const at = nearest(line.x, step);
      const range = line.h[at] > line.l[at] ? ` (${figure(line.l[at])} to ${figure(line.h[at])})` : "";
      rows.push([line, `${line.n}: ${figure(line.y[at])}${range}`]);
    }
    return rows;
  };

  document.querySelectorAll("svg[data-chart]").forEach((svg) => {
    const chart = data.charts[svg.dataset.chart];
    svg.addEventListener("pointermove", (event) => {
      const box = svg.getBoundingClientRect();
      const x = ((event.clientX - box.left) / box.width) * data.width;
      if (x < data.left || x > data.left + data.inner) return hide();
      const step = data.low + ((x - data.left) / data.inner) * (data.high - data.low);
      document.querySelectorAll("svg[data-chart] .cross").forEach((line) => {
        line.setAttribute("x1", x);
        line.setAttribute("x2", x);
        line.style.visibility = "visible";
      });
      tip.textContent = "";
      const head = document.createElement("b");
      head.textContent = `step ${Math.max(data.first, Math.round(step)).toLocaleString("en")}, ${chart.unit}`;
      tip.append(head);
      for (const [line, text] of readings(chart, step)) {
        const row = document.createElement("div");
        const dot = document.createElement("i");
        dot.style.background = data.colours[line.g % data.colours.length];
        row.append(dot, text);
        tip.append(row);
      }
      place(event);
    });
    svg.addEventListener("pointerleave", hide);
  });

  document.addEventListener("pointermove", (event) => {
    const over = event.target.closest ? event.target.closest("[data-tip]") : null;
    if (over) {
      tip.textContent = over.dataset.tip;
      place(event);
    } else if (!event.target.closest || !event.target.closest("svg[data-chart]")) {
      hide();
    }
  });

  const hidden = new Set();
  document.querySelectorAll(".key button").forEach((button) => {
    button.addEventListener("click", () => {
      const group = Number(button.dataset.run);
      const off = !hidden.has(group);
      if (off) hidden.add(group); else hidden.delete(group);
      button.setAttribute("aria-pressed", String(!off));
      document.querySelectorAll(`.r${group}`).forEach((node) => node.classList.toggle("off", off));
    });
  });

  const open = (id) => {
    const details = document.getElementById(id);
    if (details && details.tagName === "DETAILS") details.open = true;
  };
  document.addEventListener("click", (event) => {
    const link = event.target.closest ? event.target.closest('a[href^="#"]') : null;
    if (link) open(link.getAttribute("href").slice(1));
  });
  let closed = [];
  window.addEventListener("beforeprint", () => {
    closed = [...document.querySelectorAll("details:not([open])")];
    closed.forEach((one) => (one.open = true));
  });
  window.addEventListener("afterprint", () => closed.forEach((one) => (one.open = false)));
})();
