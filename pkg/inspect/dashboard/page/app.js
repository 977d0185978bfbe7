// SPDX-License-Identifier: Apache-2.0

// The page of xpuctl dashboard. All text of the cluster becomes text of the page, never markup.
"use strict";

const element = (id) => document.getElementById(id);

// make returns an element with a class and children, which are elements or texts.
function make(tag, className, ...children) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  for (const child of children) if (child !== null && child !== undefined) made.append(child);
  return made;
}

const svgSpace = "http://www.w3.org/2000/svg";

function makeSVG(tag, attributes) {
  const made = document.createElementNS(svgSpace, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}

// What the server has sent.
let records = new Map(); // by key
let incoming = null; // records after a new connection, until they are whole
let cluster = "", marks = {};

const overview = () => records.get("overview") || {wrong: [], sources: [], headers: {}, legend: []};

// Views. Each lists the records of a kind of objects, or what is wrong.
const views = [
  {id: "wrong", title: "What is wrong"},
  {id: "node", title: "Nodes", of: "XPUNodes"},
  {id: "pod", title: "Pods", of: "pods"},
  {id: "pool", title: "Pools", of: "DevicePools"},
  {id: "network", title: "Networks", of: "XPUNetworks"},
  {id: "xpu", title: "xPUs", of: "XPUs"},
  {id: "part", title: "Status"},
];
let view = views[0];
let items = []; // of the view, filtered: {key, record}
let chosen = ""; // key of the chosen row
let opened = ""; // key of the row whose detail is shown

// all returns what a view lists, sorted.
function all(id) {
  if (id === "wrong") return overview().wrong.map((w, i) => ({key: "wrong/" + w.kind + "/" + w.name + "/" + i, record: w}));
  if (id === "part") return (overview().parts || []).map((p) => ({key: "part/" + p.name, record: p}));
  return (keys[id] || []).map((key) => ({key, record: records.get(key)}));
}

// Keys by kind, sorted so that node2 comes before node10.
let keys = {};
const collator = new Intl.Collator("en", {numeric: true});
const kindOf = (key) => key.slice(0, Math.max(0, key.indexOf("/")));

function sortKeys() {
  keys = {};
  for (const key of records.keys()) (keys[kindOf(key)] ||= []).push(key);
  for (const all of Object.values(keys)) all.sort(collator.compare);
}

// placeOf returns where a key is in its sorted list, or where it would be.
function placeOf(key) {
  const all = keys[kindOf(key)] ||= [];
  let low = 0, high = all.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (collator.compare(all[middle], key) < 0) low = middle + 1; else high = middle;
  }
  return {all, at: low, found: all[low] === key};
}

function addKey(key) {
  const {all, at, found} = placeOf(key);
  if (!found) all.splice(at, 0, key);
}

function dropKey(key) {
  const {all, at, found} = placeOf(key);
  if (found) all.splice(at, 1);
}

const partStatus = {Good: "Done", Bad: "Failed", Unknown: "Unknown", None: "Skipped"};

function statusOf(item) {
  if (view.id === "wrong") return "Failed";
  if (view.id === "part") return partStatus[item.record.state] || "Unknown";
  return item.record.status;
}

// The connection. EventSource connects again by itself, unless the server refuses.
let source = null, lastWord = 0;

function connect() {
  source = new EventSource("events");
  source.addEventListener("begin", (e) => {
    ({cluster, marks} = JSON.parse(e.data));
    element("cluster").textContent = cluster;
    incoming = new Map();
    heard();
  });
  source.addEventListener("records", (e) => {
    const {set, gone} = JSON.parse(e.data);
    const into = incoming || records;
    const changed = new Set();
    for (const [key, record] of Object.entries(set)) {
      if (!incoming && !records.has(key)) addKey(key);
      into.set(key, record);
      changed.add(key);
    }
    for (const key of gone || []) {
      into.delete(key);
      if (!incoming) dropKey(key);
      changed.add(key);
    }
    heard();
    if (!incoming) changedRecords(changed);
  });
  source.addEventListener("whole", () => {
    records = incoming || records;
    incoming = null;
    sortKeys();
    heard();
    changedRecords(null);
  });
  source.addEventListener("alive", heard);
  source.onerror = () => {
    lost();
    if (source.readyState === EventSource.CLOSED) setTimeout(connect, 3000);
  };
}

// clock returns the time of the day, with the date if it is not today's.
function clock(time) {
  const text = new Date(time).toISOString();
  return text.slice(0, 10) === new Date().toISOString().slice(0, 10) ? text.slice(11, 19) : text.slice(0, 19).replace("T", " ");
}

function heard() {
  lastWord = Date.now();
  showConnection();
}

let isLost = false;

function lost() {
  isLost = true;
  setConnection("stale", lastWord ? "✗ xpuctl does not answer: what is shown is of " + clock(lastWord) + ". Trying again" : "✗ xpuctl does not answer. Trying again");
}

function showConnection() {
  isLost = false;
  const o = overview();
  const stale = o.sources.filter((s) => s.state === "Stale");
  if (!records.size || o.reading) return setConnection("waiting", "… reading the cluster");
  if (stale.length) {
    // A kind that was never read has no time.
    const since = stale.map((s) => s.since).filter(Boolean).sort()[0];
    return setConnection("stale", since ? "✗ the cluster does not answer: what is shown is of " + clock(since) : "✗ the cluster does not answer");
  }
  setConnection("live", "✓ live");
}

function setConnection(state, text) {
  const shown = element("connection");
  if (shown.textContent === text && shown.dataset.state === state) return;
  shown.dataset.state = state;
  shown.textContent = text;
}

// A server that was stopped, or a suspended machine, may leave the connection open.
setInterval(() => { if (lastWord && Date.now() - lastWord > 30000 && !isLost) { source.close(); lost(); setTimeout(connect, 1000); } }, 5000);

// changedRecords shows records anew. Null means that any may have changed.
let pending = false;
let pendingKeys = new Set();

function changedRecords(keys) {
  if (keys === null) pendingKeys = null;
  else if (pendingKeys) for (const key of keys) pendingKeys.add(key);
  if (pending) return;
  pending = true;
  requestAnimationFrame(() => {
    const now = pendingKeys;
    pending = false;
    pendingKeys = new Set();
    showConnection();
    showNotices();
    showViews();
    refreshList();
    if (opened && (now === null || now.has(opened))) detailChanged();
  });
}

function showNotices() {
  const o = overview();
  const texts = [];
  if (o.direct) texts.push(["", "This cluster has none of the project's kinds: direct mode, in which only the agents know, or xpu-device-plugin is not installed."]);
  // One sentence for kinds with the same trouble.
  const groups = new Map();
  for (const s of o.sources) {
    if (!s.text || o.direct && s.state === "Absent") continue;
    const known = groups.get(s.text) || {kinds: [], stale: s.state === "Stale", since: s.since};
    known.kinds.push(s.kind);
    groups.set(s.text, known);
  }
  for (const [text, g] of groups) {
    const since = g.stale && g.since ? ", not heard of since " + clock(g.since) : "";
    texts.push([g.stale ? "stale" : "", g.kinds.join(", ") + since + ": " + text]);
  }
  if (o.notShown) texts.push(["", o.notShown + " nodes and pods are not shown, because there are too many."]);
  const shown = JSON.stringify(texts);
  const notices = element("notices");
  if (notices.dataset.shown === shown) return;
  notices.dataset.shown = shown;
  notices.replaceChildren(...texts.map(([c, t]) => make("p", c, (c === "stale" ? "✗ " : "! ") + t)));
}

function showViews() {
  const counts = {};
  for (const v of views) counts[v.id] = (keys[v.id] || []).length;
  const o = overview();
  counts.wrong = o.wrong.length + (o.more || 0);
  counts.part = (o.parts || []).length;
  // How many there are is not known of what was never read.
  for (const v of views) if (v.of && !counts[v.id] && !o.sources.some((s) => s.kind === v.of && (s.state === "Live" || s.since))) counts[v.id] = "?";
  const nav = element("views");
  if (!nav.children.length) nav.append(...views.map((v) => Object.assign(make("a"), {href: "#" + v.id})));
  views.forEach((v, i) => {
    const link = nav.children[i];
    const text = v.title + " " + counts[v.id] + (v.id === "wrong" && counts.wrong ? " ✗" : "");
    if (link.textContent !== text) link.textContent = text;
    if (v === view) link.setAttribute("aria-current", "page"); else link.removeAttribute("aria-current");
  });
}

// The list. Only the rows that can be seen are elements, because a cluster has thousands.
const list = element("list"), rows = element("rows");
const made = new Map(); // rows that are elements, by index
let rowHeight = 56;
const beyond = 4; // rows above and below what can be seen

function refreshList() {
  const filter = element("filter").value.toLowerCase();
  items = all(view.id);
  const total = items.length;
  if (filter) items = items.filter((item) => searchable(item).includes(filter));
  element("heading").textContent = view.title + (filter ? ": " + items.length + " of " + total : "");
  showLegend();
  showColumns();
  rowHeight = parseFloat(getComputedStyle(document.documentElement).getPropertyValue("--row"));
  rows.style.height = Math.max(items.length * rowHeight, 1) + "px";
  if (!items.some((item) => item.key === chosen)) chosen = items.length ? items[0].key : "";
  drawRows();
  const old = rows.querySelector(".empty");
  if (old) old.remove();
  if (!items.length) rows.append(make("p", "empty", emptyText(filter)));
}

function emptyText(filter) {
  const o = overview();
  if (filter) return "Nothing has this text.";
  if (!records.size || o.reading) return "Reading the cluster.";
  if (view.id !== "wrong") return "There is nothing to show.";
  const blind = o.sources.filter((s) => s.state !== "Live");
  if (!blind.length) return "Nothing is wrong.";
  return "Nothing wrong is known, but not everything can be seen: " + blind.map((s) => s.kind).join(", ") + ".";
}

const searchTexts = new WeakMap();

function searchable(item) {
  let text = searchTexts.get(item.record);
  if (text === undefined) {
    text = (item.key + " " + JSON.stringify(item.record)).toLowerCase();
    searchTexts.set(item.record, text);
  }
  return text;
}

let drawing = false;
list.addEventListener("scroll", () => {
  if (drawing) return;
  drawing = true;
  requestAnimationFrame(() => { drawing = false; drawRows(); });
}, {passive: true});

// drawRows makes the rows that can be seen, and takes over elements of those that cannot any more.
function drawRows() {
  const first = Math.max(0, Math.floor(list.scrollTop / rowHeight) - beyond);
  const last = Math.min(items.length - 1, Math.ceil((list.scrollTop + list.clientHeight) / rowHeight) + beyond);
  const spare = [];
  for (const [i, row] of made) {
    if (i < first || i > last) { made.delete(i); spare.push(row); }
  }
  for (let i = first; i <= last; i++) {
    let row = made.get(i);
    if (!row) {
      row = spare.pop();
      if (!row) { row = make("div", "row"); row.setAttribute("role", "option"); rows.append(row); }
      made.set(i, row);
      row.style.transform = "translateY(" + i * rowHeight + "px)";
    }
    fillRow(row, i);
  }
  for (const row of spare) row.remove();
  if (made.size && chosen) list.setAttribute("aria-activedescendant", "row-" + items.findIndex((x) => x.key === chosen));
  else list.removeAttribute("aria-activedescendant");
}

function fillRow(row, i) {
  const item = items[i];
  row.id = "row-" + i;
  row.setAttribute("aria-selected", String(item.key === chosen));
  row.setAttribute("aria-setsize", items.length);
  row.setAttribute("aria-posinset", i + 1);
  if (row.shown === item.record && row.key === item.key) return;
  row.shown = item.record;
  row.key = item.key;
  const status = statusOf(item);
  row.className = "row " + view.id;
  const mark = make("span", "mark " + status, marks[status] || "?");
  mark.setAttribute("aria-label", status);
  mark.setAttribute("role", "img");
  row.replaceChildren(mark, ...drawers[view.id](item.record, status));
}

const note = (status, text) => { const n = make("div", "note " + status, text || ""); n.title = text || ""; return n; };

const drawers = {
  wrong: (w) => [make("div", "main", w.kind + " " + w.name), note("Failed", w.text)],
  part: (p, status) => [make("div", "main", p.name + " ", make("span", "more", p.text || "")), note(status, (p.notes || []).join("; "))],
  pod: (p, status) => [
    make("div", "main", p.namespace + "/" + p.name + " ", make("span", "more", podWhere(p))),
    note(status, p.text || p.interfaces.map(interfaceText).join("; "))],
  node: (n, status) => [
    make("div", "", make("div", "main", n.name + " ", make("span", "more", countText(n))), note(status, (n.notes || [])[0] || (n.asked ? "its agent said so at " + clock(n.asked) : n.agent ? "xpu-agent " + n.agent : ""))),
    strip(n)],
  pool: table("pool"), network: table("network"), xpu: table("xpu"),
};

function table(kind) {
  return (r, status) => {
    const header = overview().headers[kind] || [];
    const cells = make("div", "cells main");
    r.cells.forEach((cell, i) => {
      cells.append(make("span", (i ? "more" : "") + (cell ? "" : " empty-cell"), i ? make("span", "label", header[i] + " ") : null, cell || "-"));
    });
    return [cells, note(status, (r.notes || r.remarks || []).join("; "))];
  };
}

function showColumns() {
  const header = overview().headers[view.id];
  const columns = element("columns");
  columns.hidden = !header;
  columns.replaceChildren(...(header || []).map((name) => make("span", "", name)));
}

const podWhere = (p) => p.node ? "on " + p.node : "on no node yet";

function interfaceText(i) {
  const parts = [i.claim ? "claim " + i.claim : i.resource, i.function && "Function " + i.function, i.pool && "pool " + i.pool,
    i.networks && "network " + i.networks.join(", "), i.xpu && "XPU " + i.xpu, i.addresses && i.addresses.join(", ")];
  return parts.filter(Boolean).join(", ");
}

// Functions: a shape for each condition, so that it is not shown by colour alone. The server sends the shapes, which are those of
// the pictures of xpuctl discover.
const cell = 10, mostDrawn = 512;
const isNarrow = matchMedia("(max-width: 760px)");
const symbolOf = (condition) => overview().legend.find((s) => s.condition === condition) || {text: condition, shape: ""};

// runsOf returns the runs of Functions of a node: {condition, count}.
function runsOf(n) {
  const out = [];
  for (const pf of n.pfs) {
    for (const run of pf.functions) {
      const [condition, count] = run.split(" ");
      out.push({condition, count: Number(count)});
    }
  }
  return out;
}

const meaning = (condition) => symbolOf(condition).text;

function countText(n) {
  const counts = new Map();
  for (const {condition, count} of runsOf(n)) counts.set(condition, (counts.get(condition) || 0) + count);
  return [...counts].map(([condition, count]) => count + " " + meaning(condition)).join(", ");
}

let strips = new WeakMap();

// strip draws the Functions of a node, with one path for each condition.
function strip(n) {
  let paths = strips.get(n);
  const perLine = isNarrow.matches ? 32 : 64;
  if (!paths) {
    paths = {};
    const parts = {};
    let at = 0;
    for (const {condition, count} of runsOf(n)) {
      const {shape} = symbolOf(condition);
      for (let k = 0; k < count && at < mostDrawn; k++, at++) {
        (parts[condition] ||= []).push(`M${at % perLine * cell + 1} ${Math.floor(at / perLine) * cell + 1}${shape}`);
      }
    }
    paths.lines = Math.max(1, Math.ceil(at / perLine));
    paths.parts = Object.entries(parts).map(([condition, all]) => [condition, all.join("")]);
    strips.set(n, paths);
  }
  const svg = makeSVG("svg", {class: "strip", viewBox: `0 0 ${perLine * cell} ${paths.lines * cell}`, preserveAspectRatio: "xMinYMid meet", role: "img", "aria-label": countText(n)});
  for (const [condition, d] of paths.parts) svg.append(makeSVG("path", {class: condition, d}));
  return svg;
}

function symbol(condition) {
  const svg = makeSVG("svg", {viewBox: "-1 -1 10 10", "aria-hidden": "true"});
  svg.append(makeSVG("path", {class: condition, d: "M0 0" + symbolOf(condition).shape}));
  return svg;
}

function showLegend() {
  const legend = element("legend");
  legend.hidden = view.id !== "node";
  const shown = JSON.stringify(overview().legend);
  if (legend.dataset.shown === shown) return;
  legend.dataset.shown = shown;
  legend.replaceChildren(...overview().legend.map(({condition, text}) => make("span", "", symbol(condition), text)));
}

// Choosing and opening rows.
function choose(index) {
  if (!items.length) return;
  index = Math.min(items.length - 1, Math.max(0, index));
  chosen = items[index].key;
  const top = index * rowHeight;
  if (top < list.scrollTop) list.scrollTop = top;
  else if (top + rowHeight > list.scrollTop + list.clientHeight) list.scrollTop = top + rowHeight - list.clientHeight;
  drawRows();
}

list.addEventListener("keydown", (e) => {
  const at = items.findIndex((item) => item.key === chosen);
  const visible = Math.max(1, Math.floor(list.clientHeight / rowHeight) - 1);
  const to = {ArrowDown: at + 1, ArrowUp: at - 1, PageDown: at + visible, PageUp: at - visible, Home: 0, End: items.length - 1}[e.key];
  if (to !== undefined) choose(to);
  else if (e.key === "Enter" || e.key === " ") open(chosen);
  else return;
  e.preventDefault();
});

rows.addEventListener("click", (e) => {
  const row = e.target.closest(".row");
  if (!row) return;
  chosen = row.key;
  drawRows();
  open(row.key);
});

// open shows the detail of a row. A row of what is wrong opens the object that it is about.
function open(key) {
  const item = items.find((x) => x.key === key);
  if (!item) return;
  if (view.id === "wrong" && records.has(item.record.kind + "/" + item.record.name)) {
    location.hash = item.record.kind + "/" + item.record.name;
    return;
  }
  location.hash = view.id === "wrong" || view.id === "part" ? view.id : key;
  if (view.id === "part" || view.id === "wrong") openDetail(key);
}

// The address after # is a view, or a view and an object.
function route() {
  const [kind, ...rest] = decodeURIComponent(location.hash.slice(1)).split("/");
  const next = views.find((v) => v.id === kind) || views[0];
  const isNew = next !== view;
  view = next;
  if (isNew) {
    for (const row of made.values()) row.remove();
    made.clear();
    chosen = "";
    list.scrollTop = 0;
  }
  const key = rest.length ? kind + "/" + rest.join("/") : "";
  if (key) chosen = key;
  showViews();
  refreshList();
  if (key && isNew) choose(items.findIndex((x) => x.key === key));
  if (key) openDetail(key); else closeDetail(false);
}

addEventListener("hashchange", route);

function openDetail(key) {
  const isNew = opened !== key;
  opened = key;
  element("detail").hidden = false;
  document.querySelector("main").classList.add("open");
  element("detail-heading").textContent = titleOf(key);
  element("again").hidden = !key.startsWith("pod/") && !key.startsWith("node/");
  if (isNew) element("detail-body").replaceChildren(make("p", "", "Asking the cluster."));
  showDetail();
  drawRows();
  if (isNew) element("detail-heading").focus();
}

function closeDetail(focus) {
  opened = "";
  element("detail").hidden = true;
  document.querySelector("main").classList.remove("open");
  drawRows();
  if (focus) list.focus();
}

function titleOf(key) {
  const [kind, ...rest] = key.split("/");
  return kind === "wrong" ? rest.slice(0, -1).join(" ") : kind + " " + rest.join("/");
}

function leave() {
  if (!opened) return;
  if (location.hash.includes("/")) { location.hash = view.id; list.focus(); } else closeDetail(true);
}

element("close").addEventListener("click", leave);
element("again").addEventListener("click", () => showDetail());
element("filter").addEventListener("input", () => { list.scrollTop = 0; refreshList(); });
element("skip").addEventListener("click", (e) => { e.preventDefault(); list.focus(); });
addEventListener("keydown", (e) => {
  if (e.key === "Escape") {
    if (e.target === element("filter") && element("filter").value) { element("filter").value = ""; refreshList(); } else leave();
  } else if (e.key === "/" && e.target !== element("filter")) { e.preventDefault(); element("filter").focus(); }
});
addEventListener("resize", () => { strips = new WeakMap(); for (const row of made.values()) row.remove(); made.clear(); refreshList(); });

// Details.
let question = null; // the request that is under way
let lastAsked = 0, askLater = null;

// detailChanged asks again, at most every three seconds, since each question costs the cluster something.
function detailChanged() {
  clearTimeout(askLater);
  askLater = setTimeout(() => { if (opened) showDetail(); }, Math.max(0, lastAsked + 3000 - Date.now()));
}

async function showDetail() {
  const key = opened;
  const [kind, ...rest] = key.split("/");
  lastAsked = Date.now();
  if (question) question.abort();
  if (kind === "pod") return ask(key, "explain?" + new URLSearchParams({namespace: rest[0], name: rest[1]}), drawPod, null);
  if (kind === "node") return ask(key, "node?" + new URLSearchParams({name: rest.join("/")}), drawNode, records.get(key));
  if (kind === "part") {
    const part = (overview().parts || []).find((p) => p.name === rest.join("/"));
    return setDetail(part ? [make("p", "", part.text), notes(part.notes)] : [make("p", "", "There is no such program.")]);
  }
  if (kind === "wrong") {
    const item = items.find((x) => x.key === key);
    return setDetail([make("p", "", item ? item.record.text : "This is not wrong any more.")]);
  }
  const record = records.get(key);
  setDetail(record ? drawRow(kind, record) : [make("p", "", "It is gone.")]);
}

async function ask(key, address, draw, known) {
  question = new AbortController();
  const body = element("detail-body");
  const before = known ? [notes(known.notes), notes(known.remarks, "Done")] : [];
  try {
    const answer = await fetch(address, {signal: question.signal});
    const content = answer.ok ? draw(await answer.json()) : [make("p", "Failed", "✗ " + (await answer.text()))];
    if (!answer.ok && known) content.push(...knownPFs(known));
    if (opened === key) setDetail([...before, ...content, make("p", "Skipped", "asked at " + clock(Date.now()))]);
  } catch (err) {
    if (err.name === "AbortError" || opened !== key) return;
    body.prepend(make("p", "Failed", "✗ xpuctl does not answer; what is below is older"));
  }
}

function setDetail(content) {
  const body = element("detail-body");
  const top = body.scrollTop;
  body.replaceChildren(...content.filter(Boolean));
  body.scrollTop = top;
}

const notes = (texts, status = "Failed") => texts && texts.length ? make("ul", status, ...texts.map((t) => make("li", "", t))) : null;

function drawRow(kind, record) {
  const header = overview().headers[kind] || [];
  const body = make("tbody", "", ...record.cells.map((c, i) => make("tr", "", make("th", "", header[i]), make("td", "", c || "-"))));
  return [notes(record.notes), notes(record.remarks, "Done"), make("table", "", body)];
}

function makeTable(header, lines) {
  return make("table", "", make("thead", "", make("tr", "", ...header.map((h) => Object.assign(make("th", "", h), {scope: "col"})))),
    make("tbody", "", ...lines.map((line) => make("tr", "", ...line.map((c) => make("td", "", ...[c].flat()))))));
}

const dash = (text) => text === undefined || text === "" || text === 0 || text === null ? "-" : String(text);

// drawPod shows what "xpuctl explain" says, the stages of each interface as a timeline.
function drawPod(p) {
  const out = [make("p", "verdict " + (p.ok ? "Done" : "Failed"), (p.ok ? p.marks.Done : p.marks.Failed) + " " + p.verdict),
    make("p", "", [p.phase, p.node && "on node " + p.node].filter(Boolean).join(" "))];
  p.interfaces.forEach((i, n) => {
    out.push(make("h3", "", p.titles[n] || "interface"));
    const where = [["Function", i.function], ["pool", i.pool], ["network", i.network], ["XPU", i.xpu]].filter(([, v]) => v);
    out.push(make("p", "", where.map((pair) => pair.join(" ")).join(", ")));
    out.push(make("ol", "timeline", ...i.stages.map((s) => {
      const mark = make("span", "mark", p.marks[s.status] || "?");
      mark.setAttribute("role", "img");
      mark.setAttribute("aria-label", s.status);
      return make("li", s.status, mark, make("span", "name", s.name), s.time ? make("span", "when", clock(s.time)) : null,
        s.text ? make("div", "text", s.text) : null);
    })));
    if (i.host || i.card) {
      const side = (name, s) => [name, dash(s && s.mac), dash(s && s.vlan), dash(s && s.mtu), dash(s && s.addresses && s.addresses.join(", ")), dash(s && s.port), dash(s && s.state)];
      out.push(makeTable(["", "MAC", "VLAN", "MTU", "ADDRESSES", "PORT", "STATE"], [side("in the pod", i.host), side("at the xPU", i.card)]));
    }
    out.push(notes(i.differences));
  });
  if (p.why && p.why.length > 1) out.push(make("h3", "", "why it stays pending"), make("ul", "", ...p.why.slice(1).map((w) => make("li", "", w))));
  if (p.events && p.events.length) {
    out.push(make("h3", "", "last events"), makeTable(["TIME", "OBJECT", "REASON", "MESSAGE"],
      p.events.slice(-10).map((e) => [clock(e.time), e.object, e.reason, e.message + (e.count > 1 ? " (" + e.count + " times)" : "")])));
  }
  for (const text of p.unknown || []) out.push(make("p", "Unknown", "? not known: " + text));
  return out;
}

// drawNode shows what the agent says.
function drawNode(n) {
  const out = [make("p", "", n.title)];
  for (const card of n.cards) {
    out.push(make("h3", "", card.title));
    for (const pf of card.pfs) {
      out.push(make("p", "", make("strong", "", pf.title), " ", pf.detail));
      const shown = pf.functions.filter((f, i) => i > 0 || f.troubles || f.who).slice(0, mostDrawn);
      out.push(makeTable(["Function", "", "pool", "who has it, or what is wrong"], shown.map((f) => [
        [f.id + " ", make("span", "", f.name)],
        [symbol(f.condition), meaning(f.condition)],
        dash(f.pool), [...(f.who ? [f.who] : []), ...(f.troubles || [])].join("; ") || dash([f.netdev, f.driver].filter(Boolean).join(", "))])));
      if (pf.functions.length > mostDrawn) out.push(make("p", "", pf.functions.length - mostDrawn + " more are not shown"));
    }
  }
  return out;
}

// knownPFs shows what objects of the cluster say, for a node whose agent cannot be asked.
function knownPFs(n) {
  const out = [make("p", "", "Objects of the cluster say:")];
  for (const pf of n.pfs) {
    out.push(make("p", "", make("strong", "", pf.title), " ", pf.detail || "", " ", countText({pfs: [pf]})));
  }
  return out;
}

route();
connect();
