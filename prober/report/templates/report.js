"use strict";
// Filters, sorting, opening and copying. The page is complete without this script.
(() => {
  const byId = (id) => document.getElementById(id);
  const table = byId("rows"), body = table.tBodies[0], heat = byId("heat"), form = byId("filters");
  const headings = Array.from(table.tHead.rows[0].cells);
  const keys = headings.map((th) => th.dataset.key);
  const UNKNOWN = "–";

  const rows = Array.from(body.rows, (tr) => {
    const texts = {};
    keys.forEach((key, i) => { texts[key] = (i ? tr.cells[i] : tr.querySelector("summary bdi")).textContent; });
    const { place, combination, caution, merit, style, text } = tr.dataset;
    const [down, across] = place.split(" ").map(Number);
    return { tr, texts, heat: { place, combination, caution: +caution, merit: +merit, style, text }, down, across,
      plainModel: texts.model.toLowerCase(), day: Date.parse(texts.measured), detail: null };
  });
  const models = new Set(rows.map((row) => row.texts.model));

  // Filters: a row is shown if it passes all of them; options that would leave no row are disabled.
  const inputs = Array.from(form.querySelectorAll("[data-filter]"));
  const passes = {
    model: (row, text) => models.has(text) ? row.texts.model === text
      : text.toLowerCase().split(/\s+/).every((word) => row.plainModel.includes(word)),
    age: (row, days) => Date.now() - row.day <= days * 864e5,
  };
  const passesOne = (row, key, value) => passes[key] ? passes[key](row, value) : row.texts[key] === value;
  const activeFilters = () => inputs.filter((input) => input.value).map((input) => [input.dataset.filter, input.value]);
  let shown = rows;

  function filter() {
    const active = activeFilters();
    const others = new Map(inputs.map((input) => [input.dataset.filter, new Set()]));
    shown = [];
    for (const row of rows) {
      const failed = active.filter(([key, value]) => !passesOne(row, key, value));
      if (!failed.length) shown.push(row);
      if (failed.length < 2) {
        for (const [key, values] of others) if (!failed.length || failed[0][0] === key) values.add(row.texts[key]);
      }
      show(row, !failed.length);
    }
    for (const input of inputs) {
      input.classList.toggle("set", input.value !== "");
      const key = input.dataset.filter;
      if (input.options && key !== "age") {
        for (const option of input.options) option.disabled = option.value !== "" && !others.get(key).has(option.value);
      }
    }
    const count = (n) => n.toLocaleString("en-US");
    byId("shown").value = shown.length === rows.length ? `${count(rows.length)} rows` : `${count(shown.length)} of ${count(rows.length)} rows`;
    byId("nothing").hidden = shown.length > 0;
    drawHeat();
    hideCurves();
    history.replaceState(null, "", active.length ? `#${new URLSearchParams(active)}` : location.pathname + location.search);
  }

  function show(row, isShown) {
    if (row.tr.hidden === isShown) row.tr.hidden = !isShown;
    if (row.detail) row.detail.hidden = !isShown;
  }

  function readAddress() {
    if (!location.hash.includes("=")) return;
    const values = new URLSearchParams(location.hash.slice(1));
    for (const input of inputs) input.value = values.get(input.dataset.filter) ?? "";
    filter();
  }

  // The heatmap of the rows that pass the filters. heatmap.py ranks each row; this selects by rank.
  const columns = Array.from(heat.tHead.rows[1].cells);
  const groups = Array.from(heat.tHead.rows[0].cells).slice(1).map((th) => ({ th, span: th.colSpan }));

  const byCaution = [...rows].sort((a, b) => a.heat.caution - b.heat.caution);

  function bestByPlace() {
    const passing = new Set(shown), combinations = new Set(), best = new Map();
    for (const row of byCaution) {
      const { place, combination, merit } = row.heat;
      if (!passing.has(row) || combinations.has(combination)) continue;
      combinations.add(combination);
      if (!(best.get(place)?.merit <= merit)) best.set(place, row.heat);
    }
    return best;
  }

  function drawHeat() {
    const best = bestByPlace();
    const across = new Set(shown.map((row) => row.across)), down = new Set(shown.map((row) => row.down));
    Array.from(heat.tBodies[0].rows).forEach((tr, d) => {
      tr.hidden = !down.has(d);
      for (let a = 0; a < columns.length; a++) {
        const td = tr.cells[a + 1], entry = best.get(`${d} ${a}`);
        td.hidden = !across.has(a);
        if (!td.firstElementChild) continue;
        td.className = entry?.style ?? "";
        td.firstElementChild.textContent = entry?.text ?? "";
        td.firstElementChild.hidden = !entry;
      }
    });
    columns.forEach((th, a) => { th.hidden = !across.has(a); });
    let a = 0;
    for (const { th, span } of groups) {
      const left = columns.slice(a, a += span).filter((column) => !column.hidden).length;
      th.hidden = left === 0;
      if (left) th.colSpan = left;
    }
    reachable();
  }

  // One stop for the Tab key, arrows inside.
  const buttons = () => Array.from(heat.querySelectorAll("tbody button")).filter((button) => button.offsetParent);
  function reachable(chosen) {
    const all = buttons();
    const stop = chosen ?? all.find((button) => button.tabIndex === 0) ?? all[0];
    heat.querySelectorAll("button[tabindex='0']").forEach((button) => { button.tabIndex = -1; });
    if (stop) stop.tabIndex = 0;
  }

  function makeHeatButtons() {
    for (const td of heat.tBodies[0].querySelectorAll("td")) {
      if (!td.textContent) continue;
      const button = document.createElement("button");
      button.type = "button";
      button.tabIndex = -1;
      button.textContent = td.textContent;
      td.replaceChildren(button);
    }
    reachable();
  }

  function set(values) {
    for (const input of inputs) if (input.dataset.filter in values) input.value = values[input.dataset.filter];
    filter();
  }

  heat.addEventListener("click", (event) => {
    const td = event.target.closest("tbody td");
    if (!td?.firstElementChild) return;
    const { gpu, tp } = columns[td.cellIndex - 1].dataset;
    set({ model: td.parentElement.cells[0].title, gpu, tp });
    const place = byId("table");
    place.focus({ preventScroll: true });
    place.scrollIntoView({ block: "start" });
  });

  heat.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
    const td = event.target.closest("tbody td");
    if (!step || !td) return;
    event.preventDefault();
    const trs = heat.tBodies[0].rows;
    let d = td.parentElement.sectionRowIndex + step[0], a = td.cellIndex + step[1];
    for (; trs[d]?.cells[a] && a > 0; d += step[0], a += step[1]) {
      const button = trs[d].cells[a].firstElementChild;
      if (!button?.offsetParent) continue;
      reachable(button);
      button.focus();
      return;
    }
  });

  // Curves of the rows that pass the filters.
  const curves = Array.from(document.querySelectorAll(".curves > details"));
  function hideCurves() {
    const left = new Set(shown.map((row) => `${row.texts.model}\n${row.texts.gpu}`));
    for (const one of curves) one.hidden = !left.has(`${one.dataset.model}\n${one.dataset.gpu}`);
    const section = curves[0]?.closest("section");
    if (section) section.hidden = curves.every((one) => one.hidden);
  }

  // Sorting: unknown values stay at the end in both directions.
  const collator = new Intl.Collator("en", { numeric: true });
  const number = (text) => { const found = /[\d,]*\.?\d+/.exec(text); return found ? +found[0].replaceAll(",", "") : null; };
  const isUnknown = (text) => text === UNKNOWN || text === "unknown";

  function sort(th) {
    const isDown = th.getAttribute("aria-sort") ? th.getAttribute("aria-sort") === "ascending" : th.dataset.key === "ceiling";
    for (const other of headings) other.removeAttribute("aria-sort");
    th.setAttribute("aria-sort", isDown ? "descending" : "ascending");
    const key = th.dataset.key, isNumber = th.classList.contains("n"), sign = isDown ? -1 : 1;
    const valued = rows.map((row) => {
      const text = row.texts[key];
      return { row, value: isNumber ? number(text) : isUnknown(text) ? null : text };
    });
    valued.sort((a, b) => a.value === null || b.value === null ? (a.value === null) - (b.value === null)
      : sign * (isNumber ? a.value - b.value : collator.compare(a.value, b.value)));
    body.append(...valued.flatMap(({ row }) => row.detail ? [row.tr, row.detail] : [row.tr]));
  }

  for (const th of headings) {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = th.textContent;
    button.addEventListener("click", () => sort(th));
    th.replaceChildren(button);
  }

  // An open row's detail moves to its own full-width row.
  const rowOf = new Map(rows.map((row) => [row.tr, row]));
  body.addEventListener("toggle", (event) => {
    const row = rowOf.get(event.target.closest("tr"));
    if (!row) return;
    if (event.target.open && !row.detail) {
      row.detail = document.createElement("tr");
      row.detail.className = "opened";
      const td = row.detail.insertCell();
      td.colSpan = keys.length;
      td.append(event.target.querySelector(".detail"));
      for (const facts of td.querySelectorAll("pre.list")) facts.replaceWith(listOf(facts));
      const command = td.querySelector(".command");
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = "Copy";
      button.setAttribute("aria-live", "polite");
      command.append(button);
      row.tr.after(row.detail);
    } else if (!event.target.open && row.detail) {
      row.detail.querySelector(".command button").remove();
      event.target.append(row.detail.querySelector(".detail"));
      row.detail.remove();
      row.detail = null;
    }
  }, true);

  // "name: value" lines; a line that starts with two spaces continues the value.
  function listOf(pre) {
    const list = document.createElement("dl");
    list.className = pre.className;
    for (const line of pre.textContent.replace(/\n$/, "").split("\n")) {
      if (line.startsWith("  ") && list.lastChild) {
        list.lastChild.textContent += `\n${line.slice(2)}`;
        continue;
      }
      const [name] = line.split(": ", 1);
      for (const [tag, part] of [["dt", name], ["dd", line.slice(name.length + 2)]]) {
        list.appendChild(document.createElement(tag)).textContent = part;
      }
    }
    return list;
  }

  async function copy(button) {
    const code = button.parentElement.querySelector("code");
    let isCopied = true;
    try {
      await navigator.clipboard.writeText(code.textContent);
    } catch {
      getSelection().selectAllChildren(code);
      isCopied = document.execCommand("copy");
    }
    button.textContent = isCopied ? "Copied" : "Press Ctrl+C";
    setTimeout(() => { button.textContent = "Copy"; }, 2000);
  }

  body.addEventListener("click", (event) => {
    if (event.target.closest(".command button")) copy(event.target.closest("button"));
    const link = event.target.closest("a[href^='#curves-']");
    if (link) byId(link.hash.slice(1)).open = true;
  });

  form.addEventListener("input", filter);
  form.addEventListener("change", filter);
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("reset", () => setTimeout(filter));
  addEventListener("hashchange", readAddress);
  form.hidden = false;
  for (const one of document.querySelectorAll(".scripted")) one.hidden = false;
  makeHeatButtons();
  readAddress();
})();
