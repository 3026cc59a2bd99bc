"use strict";
(() => {
  const $ = (id) => document.getElementById(id);
  const DATA = JSON.parse($("data").textContent);
  const METRIC = Object.fromEntries(DATA.metrics.map((metric) => [metric.name, metric]));
  const WORST = "worst case", ROWS_A_PAGE = 100;

  const number = (value) => (value === null || value === undefined ? NaN : Number(value));
  function shown(value, decimals) {
    if (Number.isNaN(value)) return "n/a";
    if (!Number.isFinite(value)) return value > 0 ? "∞" : "−∞";
    const text = value === 0 || Math.abs(value) >= 10 ** -decimals ? value.toFixed(decimals) : value.toExponential(1);
    return text.replace("-", "−");
  }
  function make(tag, properties = {}, ...children) {
    const element = Object.assign(document.createElement(tag), properties);
    element.append(...children);
    return element;
  }
  function options(select, pairs) {
    select.append(...pairs.map(([value, text]) => make("option", { value, textContent: text })));
  }
  const distinct = (values) => [...new Set(values)];
  const kinds = { attack: "", control: "control", worst: "bound" };
  const metricOptions = DATA.metrics.map((metric) => [metric.name, metric.head]);
  const caseOptions = DATA.cases.map((one, i) => [String(i), one.name]);
  const named = (set) => set.attack + (set.external && set.kind !== "worst" ? " (external)" : "");
  for (const set of DATA.sets) set.place = new Map(set.at.map((image, j) => [image, j]));
  const scoreOf = (set, image, metric) => (set && set.place.has(image) ? number(set.values[metric][set.place.get(image)]) : NaN);

  /* The verdict: one prepared table for each metric. */
  $("verdict-metric")?.addEventListener("change", (event) => {
    for (const table of document.querySelectorAll(".verdict")) table.hidden = table.dataset.metric !== event.target.value;
  });

  /* The table: sorted, filtered, a page at a time. */
  const table = { sort: null, up: true, page: 0, rows: { means: null, images: null } };
  function columnsShown() {
    const means = $("t-level").value === "means";
    const said = [["setting", "Setting"], ["geometry", "Geometry"]].filter(([key]) => !$(`t-${key}`).value);
    return [["case", "Case"], ["attack", "Attack"], ...said, ...(means ? [] : [["image", "Image"]]), ...metricOptions,
      ...(means ? [["n", "Images"], ["failed", "Failed"]] : [["status", "Status"]])];
  }
  function rowOf(set, more) {
    const one = DATA.cases[set.case];
    return { set, case: one.name, setting: one.setting, attack: named(set), geometry: set.geometry, text: [one.group, one.name, set.attack, set.external, set.refused, one.setting], ...more };
  }
  function allRows(level) {
    if (table.rows[level]) return table.rows[level];
    const rows = [];
    for (const set of DATA.sets) {
      if (level === "means") rows.push(rowOf(set, { n: set.n, failed: set.failed.length }));
      else {
        set.at.forEach((image, j) => rows.push(rowOf(set, { place: j, index: image, image: DATA.images[image][0], status: "ok" })));
        for (const [image, reason] of set.failed) rows.push(rowOf(set, { place: null, index: image, image: DATA.images[image][0], status: `failed: ${reason}` }));
      }
    }
    for (const row of rows) {
      row.text = [...row.text, row.image, row.status, row.index === undefined ? "" : DATA.images[row.index][1]].join(" ").toLowerCase();
    }
    return (table.rows[level] = rows);
  }
  function valueOf(row, key) {
    if (!METRIC[key]) return row[key];
    if (row.index !== undefined) return row.place === null ? NaN : number(row.set.values[key][row.place]);
    return number(row.set.means[key][0]);
  }
  function inOrder(a, b) {
    const [x, y] = [valueOf(a, table.sort), valueOf(b, table.sort)];
    if (typeof x === "string") return (table.up ? 1 : -1) * x.localeCompare(y, "en", { numeric: true });
    if (Number.isNaN(x) || Number.isNaN(y)) return Number.isNaN(x) - Number.isNaN(y);
    return x === y ? 0 : (table.up ? 1 : -1) * (x < y ? -1 : 1);
  }
  function wanted() {
    const words = $("t-text").value.toLowerCase().split(/\s+/).filter(Boolean);
    const [place, attack, setting, geometry] = ["t-case", "t-attack", "t-setting", "t-geometry"].map((id) => $(id).value);
    const rows = allRows($("t-level").value).filter((row) =>
      (!place || row.set.case === Number(place)) && (!attack || row.set.attack === attack) &&
      (!setting || row.setting === setting) && (!geometry || row.geometry === geometry) &&
      words.every((word) => row.text.includes(word)));
    return table.sort ? rows.sort(inOrder) : rows;
  }
  function cell(row, key) {
    const metric = METRIC[key], value = valueOf(row, key);
    if (key === "image") return make("td", {}, make("button", { className: "link", textContent: value, onclick: () => openImage(row.index, row.set) }));
    if (key === "attack" && row.set.by && row.index !== undefined) return make("td", { textContent: `${value} (${row.set.by[DATA.lead]?.[row.place] ?? "n/a"})` });
    if (key === "attack" && row.set.refused) return make("td", {}, value, make("small", { className: "by", textContent: "refused", title: row.set.refused }));
    if (!metric) return make("td", { textContent: value, className: key === "n" || key === "failed" ? "number" : "" });
    const made = make("td", { className: "number", textContent: shown(value, metric.decimals) });
    if (row.index === undefined) {
      const [, low, high] = row.set.means[key].map(number);
      if (!Number.isNaN(low) && !Number.isNaN(high)) made.append(" ", make("span", { className: "spread", textContent: `[${shown(low, metric.decimals)}, ${shown(high, metric.decimals)}]` }));
    } else if (row.set.by) made.title = `reached by ${row.set.by[key]?.[row.place] ?? "none"}`;
    return made;
  }
  function drawHead() {
    const columns = columnsShown();
    if (!columns.some(([key]) => key === table.sort)) table.sort = null;
    $("rows").tHead.replaceChildren(make("tr", {}, ...columns.map(([key, text]) => {
      const head = make("th", { scope: "col", className: METRIC[key] || key === "n" || key === "failed" ? "number" : "" });
      head.dataset.key = key;
      head.append(make("button", { textContent: text, onclick: () => {
        table.up = table.sort === key ? !table.up : true;
        table.sort = key;
        table.page = 0;
        drawRows();
      } }));
      return head;
    })));
  }
  function drawRows() {
    const rows = wanted(), columns = columnsShown();
    const pages = Math.max(1, Math.ceil(rows.length / ROWS_A_PAGE));
    table.page = Math.min(table.page, pages - 1);
    const first = table.page * ROWS_A_PAGE, page = rows.slice(first, first + ROWS_A_PAGE);
    for (const head of $("rows").tHead.querySelectorAll("th")) {
      head.ariaSort = head.dataset.key === table.sort ? (table.up ? "ascending" : "descending") : "none";
    }
    $("rows").tBodies[0].replaceChildren(...page.map((row) => make("tr", { className: kinds[row.set.kind] }, ...columns.map(([key]) => cell(row, key)))));
    $("t-status").textContent = rows.length ? `${first + 1} to ${first + page.length} of ${rows.length.toLocaleString("en")} rows` : "no row fits";
    $("t-back").disabled = table.page === 0;
    $("t-next").disabled = table.page >= pages - 1;
  }
  function startTable() {
    options($("t-case"), caseOptions);
    options($("t-attack"), distinct(DATA.sets.map((set) => set.attack)).map((name) => [name, name]));
    options($("t-setting"), distinct(DATA.cases.map((one) => one.setting)).map((name) => [name, name]));
    options($("t-geometry"), distinct(DATA.sets.map((set) => set.geometry)).map((name) => [name, name]));
    $("t-geometry").value = DATA.geometry;
    for (const id of ["t-level", "t-text", "t-case", "t-attack", "t-setting", "t-geometry"]) {
      $(id).addEventListener("input", () => { table.page = 0; drawHead(); drawRows(); });
    }
    $("t-back").onclick = () => { table.page -= 1; drawRows(); };
    $("t-next").onclick = () => { table.page += 1; drawRows(); };
    drawHead();
    drawRows();
  }

  /* The images: tiles that fill when they come into sight, and the one that is looked at. */
  const seen = { image: null, case: 0, attack: WORST, metric: DATA.lead, order: [] };
  const ofCase = () => DATA.sets.filter((set) => !set.refused && set.case === seen.case && (set.geometry === DATA.geometry || set.kind === "control"));
  const chosenSet = () => ofCase().find((set) => set.attack === seen.attack) ?? ofCase().find((set) => set.kind === "worst");
  function attackAt(image) {
    const set = chosenSet();
    if (seen.attack !== WORST) return seen.attack;
    return set && set.place.has(image) ? set.by[seen.metric]?.[set.place.get(image)] ?? null : null;
  }
  function album(image) {
    const script = $(`album-${image}`);
    return script ? JSON.parse(script.textContent) : null;
  }
  function picture(book, what) {
    const place = book?.of[`${seen.case}/${what.replace(/ \((oracle|reassembled)\)$/, "")}`]; // pictures lie as they are
    return place === undefined ? null : { small: book.small[place], full: book.full[place] || book.small[place], reduced: book.full[place] === null };
  }
  const watcher = new IntersectionObserver((entries) => {
    for (const entry of entries.filter((one) => one.isIntersecting)) {
      watcher.unobserve(entry.target);
      const image = Number(entry.target.dataset.image), book = album(image);
      const slots = entry.target.querySelectorAll(".pair span");
      ["private", attackAt(image)].forEach((what, i) => {
        const found = what && picture(book, what);
        const without = what === "private" && !DATA.private ? "not known" : book ? "not held here" : "no image";
        slots[i].replaceChildren(found ? make("img", { src: found.small, alt: "" }) : without);
      });
    }
  }, { root: $("gallery"), rootMargin: "300px" });
  function tile(image) {
    const set = chosenSet(), metric = METRIC[seen.metric], by = attackAt(image);
    const value = shown(scoreOf(set, image, seen.metric), metric.decimals);
    const made = make("div", { className: "tile", role: "option", tabIndex: -1, id: `tile-${image}` },
      make("span", { className: "pair" }, make("span"), make("span")),
      make("span", { className: "score" }, make("b", { textContent: value }), " ", make("span", { className: "soft", textContent: by ?? "" })),
      make("span", { className: "name", textContent: DATA.images[image][0] }));
    made.dataset.image = image;
    made.ariaSelected = image === seen.image;
    return made;
  }
  function drawGallery() {
    const set = chosenSet(), words = $("i-text").value.toLowerCase().split(/\s+/).filter(Boolean);
    const leaks = (METRIC[seen.metric].leaks || 1) * ($("i-order").value === "safe" ? -1 : 1);
    const images = distinct(ofCase().flatMap((one) => [...one.at, ...one.failed.map(([image]) => image)]))
      .filter((image) => words.every((word) => DATA.images[image].join(" ").toLowerCase().includes(word)));
    const value = new Map(images.map((image) => [image, scoreOf(set, image, seen.metric)]));
    const byName = (a, b) => DATA.images[a][0].localeCompare(DATA.images[b][0], "en", { numeric: true });
    images.sort((a, b) => {
      const [x, y] = [value.get(a), value.get(b)];
      if ($("i-order").value === "name" || x === y || (Number.isNaN(x) && Number.isNaN(y))) return byName(a, b);
      if (Number.isNaN(x) || Number.isNaN(y)) return Number.isNaN(x) ? 1 : -1;
      return x > y === leaks > 0 ? -1 : 1;
    });
    seen.order = images;
    if (!images.includes(seen.image)) seen.image = images[0] ?? null;
    watcher.disconnect();
    $("gallery").replaceChildren(...images.map(tile));
    for (const one of $("gallery").children) watcher.observe(one);
    $("i-status").textContent = `${images.length.toLocaleString("en")} of ${DATA.images.length.toLocaleString("en")} images`;
    select(seen.image);
  }
  function select(image, focus = false) {
    for (const one of $("gallery").querySelectorAll("[aria-selected=true]")) { one.ariaSelected = "false"; one.tabIndex = -1; }
    seen.image = image;
    $("viewer").hidden = image === null;
    if (image === null) return;
    const made = $(`tile-${image}`);
    if (made) {
      made.ariaSelected = "true";
      made.tabIndex = 0;
      if (focus) made.focus();
    }
    drawViewer();
  }
  function drawViewer() {
    const image = seen.image, book = album(image), what = attackAt(image);
    const pair = [picture(book, "private"), what && picture(book, what)];
    const box = $("compare"), parts = box.querySelectorAll("img");
    $("v-name").textContent = DATA.images[image][0];
    parts.forEach((part, i) => {
      part.hidden = !pair[i];
      if (pair[i]) part.src = pair[i].full; else part.removeAttribute("src");
    });
    parts[0].alt = `Private image ${DATA.images[image][0]}`;
    parts[1].alt = `Reconstruction by ${what}`;
    box.querySelector(".second").textContent = what ?? "no attack";
    const none = box.querySelector(".none");
    none.hidden = Boolean(pair[0] || pair[1]);
    none.textContent = "no image was kept";
    const lead = DATA.private ? 0 : 1;
    parts[lead].onload = () => box.classList.toggle("pixels", parts[lead].naturalWidth < 150 && !pair[lead].reduced);
    const folder = DATA.kept === "pictures" ? `pictures/${DATA.images[image][1]}/` : `${DATA.kept}/`;
    $("v-note").textContent = pair[1] && !DATA.private ? `No private image is known.${pair[1].reduced ? ` Shown from a thumbnail; the full size lies under ${folder}.` : ""}`
      : !pair[0] || !pair[1] ? `${pair[0] ? "This reconstruction" : pair[1] ? "The private image" : "The reconstructions of this image"} cannot be shown here; what was kept lies under ${folder}.`
      : pair[0].reduced || pair[1].reduced ? `Shown from thumbnails; the full size lies under ${folder}.` : "";
    moveCut();
    drawScores(image, what);
  }
  function drawScores(image, what) {
    const metrics = DATA.metrics.filter((metric) => ofCase().some((set) => !Number.isNaN(number(set.means[metric.name][0]))));
    $("v-scores").tHead.replaceChildren(make("tr", {}, make("th", { scope: "col", textContent: "Attack" }), ...metrics.map((metric) => make("th", { scope: "col", className: "number", textContent: metric.head }))));
    $("v-scores").tBodies[0].replaceChildren(...ofCase().filter((set) => set.kind !== "worst").map((set) => {
      const failed = set.failed.find(([one]) => one === image);
      const name = set.kind === "attack" ? make("button", { className: "link", textContent: named(set), onclick: () => choose(set.attack) }) : named(set);
      return make("tr", { className: set.attack === what ? "on" : "" }, make("td", {}, name, failed ? ` failed: ${failed[1]}` : ""),
        ...metrics.map((metric) => make("td", { className: "number", textContent: shown(scoreOf(set, image, metric.name), metric.decimals) })));
    }));
  }
  function moveCut() {
    $("compare").style.setProperty("--cut", `${DATA.private ? $("v-cut").value : 0}%`);
    $("v-cut").ariaValueText = `${$("v-cut").value} % private image`;
  }
  function choose(attack) {
    seen.attack = $("i-attack").value = attack;
    drawGallery();
  }
  function fillAttacks() {
    const names = ofCase().filter((set) => set.kind === "attack").map((set) => set.attack);
    $("i-attack").replaceChildren();
    const all = [...(DATA.private ? [WORST] : []), ...distinct(names), ...(DATA.fed ? ["fed"] : [])];
    options($("i-attack"), all.map((name) => [name, name === "fed" ? "what the client fed" : name]));
    if (!all.includes(seen.attack)) seen.attack = all[0] ?? WORST;
    $("i-attack").value = seen.attack;
  }
  function openImage(image, set) {
    seen.case = set.case;
    $("i-case").value = String(set.case);
    seen.attack = set.kind === "attack" ? set.attack : WORST; // `fillAttacks` takes another one where there is no worst case
    $("i-text").value = "";
    fillAttacks();
    seen.image = image;
    drawGallery();
    $("viewer").scrollIntoView({ block: "center" });
    $("v-cut").focus({ preventScroll: true });
  }
  function stroll(event) {
    const at = seen.order.indexOf(seen.image);
    const across = getComputedStyle($("gallery")).gridTemplateColumns.split(" ").length;
    const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: across, ArrowUp: -across, Home: -at, End: seen.order.length - 1 - at, PageDown: 3 * across, PageUp: -3 * across }[event.key];
    if (step === undefined) return;
    event.preventDefault();
    select(seen.order[Math.max(0, Math.min(seen.order.length - 1, at + step))], true);
  }
  function startImages() {
    options($("i-case"), caseOptions);
    options($("i-metric"), metricOptions);
    $("i-metric").value = seen.metric;
    seen.case = Number($("i-case").dataset.opens);
    $("i-case").value = String(seen.case);
    fillAttacks();
    $("i-case").addEventListener("input", () => { seen.case = Number($("i-case").value); fillAttacks(); drawGallery(); });
    $("i-attack").addEventListener("input", () => choose($("i-attack").value));
    $("i-metric").addEventListener("input", () => { seen.metric = $("i-metric").value; drawGallery(); });
    for (const id of ["i-order", "i-text"]) $(id).addEventListener("input", drawGallery);
    $("v-cut").addEventListener("input", moveCut);
    $("gallery").addEventListener("keydown", stroll);
    $("gallery").addEventListener("click", (event) => {
      const one = event.target.closest(".tile");
      if (one) select(Number(one.dataset.image), true);
    });
    for (const one of $("compare").querySelectorAll(".first, .bar, input")) one.hidden = !DATA.private;
    drawGallery();
  }

  /* The distribution: a line of dots and a box for each case and attack. */
  const plot = $("d-plot");
  function draw(parent, tag, attributes, text) {
    const made = document.createElementNS(plot.namespaceURI, tag);
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    if (text !== undefined) made.textContent = text;
    parent.append(made);
    return made;
  }
  function quantile(sorted, share) {
    const at = share * (sorted.length - 1), low = Math.floor(at);
    const [a, b] = [sorted[low], sorted[Math.ceil(at)]];
    return a === b ? a : a + (at - low) * (b - a);
  }
  function ticks(low, high) {
    const rough = (high - low) / 5, unit = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((n) => n * unit).find((n) => n >= rough);
    const decimals = Math.max(0, -Math.floor(Math.log10(step)));
    const marks = [];
    for (let i = Math.ceil(low / step); i * step <= high; i += 1) marks.push([i * step, shown(i * step, decimals)]);
    return marks;
  }
  function drawDots(parent, values, x, y, height) {
    const many = values.length > 300;
    const path = values.map((value, i) => `M${x(value).toFixed(1)} ${(y + ((((i + 1) * 0.618) % 1) - 0.5) * height).toFixed(1)}h0`).join("");
    draw(parent, "path", { class: "dots", d: path, "stroke-width": many ? 2.5 : 4 });
  }
  function drawPlot() {
    const metric = METRIC[$("d-metric").value], only = $("d-case").value, width = plot.parentElement.clientWidth;
    const sets = DATA.sets.filter((set) => !set.refused && (set.geometry === DATA.geometry || set.kind === "control") && (!only || set.case === Number(only)) && (metric.leaks || set.kind !== "worst"));
    const values = new Map(sets.map((set) => [set, set.values[metric.name].map(number).filter((value) => !Number.isNaN(value)).sort((a, b) => a - b)]));
    const finite = sets.flatMap((set) => values.get(set).filter(Number.isFinite));
    const exact = sets.some((set) => values.get(set).some((value) => value === Infinity));
    let low = finite.length ? finite.reduce((a, b) => Math.min(a, b)) : 0, high = finite.length ? finite.reduce((a, b) => Math.max(a, b)) : 1;
    if (low === high) [low, high] = [low - 0.5, high + 0.5];
    const narrow = width < 560, left = narrow ? 8 : 190, right = width - (exact ? 72 : 12);
    const x = (value) => value === Infinity ? width - 24 : left + ((value - low) / (high - low)) * (right - left);
    const step = narrow ? 40 : 26;
    plot.replaceChildren();
    const grid = draw(plot, "g", {});
    let y = 20, last = null;
    for (const set of sets) {
      if (set.case !== last) { y += last === null ? 8 : 16; draw(plot, "text", { class: "head", x: 0, y: y + 4 }, caseOptions[set.case][1]); y += narrow ? 8 : 20; last = set.case; }
      const group = draw(plot, "g", { class: kinds[set.kind] }), found = values.get(set);
      const middle = narrow ? y + 26 : y, inner = found.filter(Number.isFinite);
      draw(group, "text", narrow ? { x: left, y: y + 14 } : { x: left - 12, y: y + 4, "text-anchor": "end" }, named(set));
      if (!found.length) draw(group, "text", { class: "tick", x: left + 4, y: middle + 4 }, "n/a");
      else {
        const [a, q1, q2, q3, b] = [0, 0.25, 0.5, 0.75, 1].map((share) => quantile(found, share));
        draw(group, "title", {}, `${found.length} images: lowest ${shown(a, metric.decimals)}, quarter ${shown(q1, metric.decimals)}, median ${shown(q2, metric.decimals)}, three quarters ${shown(q3, metric.decimals)}, highest ${shown(b, metric.decimals)}`);
        drawDots(group, found, x, middle, 11);
        draw(group, "path", { class: "box", d: `M${x(a)} ${middle}H${x(q1)}M${x(q3)} ${middle}H${x(b)}M${x(q1)} ${middle - 7}H${x(q3)}V${middle + 7}H${x(q1)}Z` });
        draw(group, "path", { class: "median", d: `M${x(q2)} ${middle - 9}V${middle + 9}` });
        const infinite = found.length - inner.length;
        if (infinite) draw(group, "text", { x: width, y: middle - 7, "text-anchor": "end" }, `×${infinite}`);
      }
      y += step;
    }
    for (const [value, text] of ticks(low, high)) {
      draw(grid, "path", { class: "grid", d: `M${x(value)} 18V${y}` });
      draw(grid, "text", { class: "tick", x: x(value), y: 12, "text-anchor": "middle" }, text);
    }
    if (exact) draw(grid, "text", { class: "tick", x: width - 24, y: 12, "text-anchor": "middle" }, "∞");
    plot.setAttribute("viewBox", `0 0 ${width} ${y}`);
    plot.setAttribute("height", y);
  }
  function startDistribution() {
    options($("d-metric"), metricOptions);
    options($("d-case"), caseOptions);
    $("d-metric").value = DATA.lead;
    let ready = false, width = 0;
    for (const id of ["d-metric", "d-case"]) $(id).addEventListener("input", drawPlot);
    new IntersectionObserver((entries, self) => {
      if (entries.some((entry) => entry.isIntersecting)) { self.disconnect(); ready = true; drawPlot(); }
    }, { rootMargin: "600px" }).observe($("distribution"));
    new ResizeObserver(() => {
      if (ready && plot.parentElement.clientWidth !== width) { width = plot.parentElement.clientWidth; drawPlot(); }
    }).observe(plot.parentElement);
  }

  $("copy")?.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText($("command").textContent);
      $("copied").textContent = "copied";
    } catch {
      getSelection().selectAllChildren($("command"));
      $("copied").textContent = "selected: copy it with the keyboard";
    }
  });
  startTable();
  startDistribution();
  document.addEventListener("DOMContentLoaded", startImages); /* the pictures stand below this script */
})();
