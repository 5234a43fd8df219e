'use strict';
// Text of numbers, and elements. Nothing here or elsewhere in the page parses HTML: what the server
// sends is only ever set as text.

const scaled = (value, steps) => {
  for (const [size, unit] of steps) if (Math.abs(value) >= size) return [value / size, unit];
  const [size, unit] = steps[steps.length - 1];
  return [value / size, unit];
};
const digits = (value) => {
  const size = Math.abs(value);
  if (size === 0) return '0';
  if (size >= 999.5) return Math.round(value).toLocaleString('en');
  return String(Number(value.toPrecision(size < 0.001 ? 2 : 3)));
};
const withUnit = (value, steps) => {
  if (value === null || value === undefined || !Number.isFinite(value)) return '–';
  const [number, unit] = scaled(value, steps);
  return digits(number) + (unit ? '\u202f' + unit : '');
};

const DECIMAL = [[1e15, 'P'], [1e12, 'T'], [1e9, 'G'], [1e6, 'M'], [1e3, 'k'], [1, '']];
const prefixed = (unit) => [...DECIMAL.map(([size, prefix]) => [size, prefix + unit])];
const format = {
  count: (v) => (v === null || !Number.isFinite(v)) ? '–' : v < 1e5 ? digits(v) : withUnit(v, DECIMAL),
  bytes: (v) => withUnit(v, [[2 ** 40, 'TiB'], [2 ** 30, 'GiB'], [2 ** 20, 'MiB'], [2 ** 10, 'KiB'], [1, 'B']]),
  byteRate: (v) => withUnit(v, prefixed('B/s')),
  flops: (v) => withUnit(v, prefixed('FLOP')),
  flopRate: (v) => withUnit(v, prefixed('FLOP/s')),
  seconds: (v) => withUnit(v, [[1, 's'], [1e-3, 'ms'], [1e-6, 'µs'], [1e-9, 'ns']]),
  nanos: (v) => format.seconds(v * 1e-9),
  perSecond: (v) => (v === null || !Number.isFinite(v)) ? '–' : format.count(v) + '/s',
  // 100% only where it is all of it, 0% only where it is nothing.
  share: (v) => {
    if (v === null || !Number.isFinite(v)) return '–';
    if (v > 0 && v < 0.001) return '<0.1%';
    if (v < 1 && v > 0.999) return '>99.9%';
    return digits(v * 100) + '%';
  },
  duration: (s) => {
    if (s < 60) return Math.round(s) + ' s';
    if (s < 3600) return Math.floor(s / 60) + ' min ' + Math.floor(s % 60) + ' s';
    if (s < 86400) return Math.floor(s / 3600) + ' h ' + Math.floor(s % 3600 / 60) + ' min';
    return Math.floor(s / 86400) + ' d ' + Math.floor(s % 86400 / 3600) + ' h';
  },
};
const ratio = (a, b) => (b > 0 ? a / b : null);
const sum = (list) => list.reduce((total, value) => total + value, 0);

const $ = (id) => document.getElementById(id);

// An element with attributes and children; strings become text nodes. `class` and `data-…` as usual.
const build = (create) => (name, attributes = {}, ...children) => {
  const node = create(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined && value !== false) node.setAttribute(key, value);
  }
  for (const child of children.flat(Infinity)) {
    if (child !== null && child !== undefined && child !== false) node.append(child);
  }
  return node;
};
const el = build((name) => document.createElement(name));
const svg = build((name) => document.createElementNS('http://www.w3.org/2000/svg', name));

// Rows of [label, value, text, colour class]: bars on one scale, the longest full.
const bars = (rows) => {
  const most = Math.max(...rows.map((row) => row[1]), 1e-300);
  return el('div', {class: 'bars'}, rows.map(([label, value, text, color]) => {
    const fill = el('div', {class: 'fill ' + (color ?? '')});
    fill.style.width = (100 * value / most).toFixed(2) + '%';
    fill.hidden = value === 0;
    return [el('span', {}, label), el('div', {class: 'track'}, fill), el('span', {class: 'number'}, text)];
  }));
};

// A name that may be broken after an underscore.
const breakable = (text) => text.split(/(?<=_)/).flatMap((part, i) => i === 0 ? [part] : [el('wbr'), part]);

const table = (header, rows) => [
  el('thead', {}, el('tr', {}, header)),
  el('tbody', {}, rows),
];

// "9.2× less than standard"
const lessThanStandard = (s) => {
  if (!(s.tile_bytes > 0) || !(s.standard_bytes > 0)) return '';
  const times = s.standard_bytes / s.tile_bytes;
  return times >= 1 ? `${digits(times)}× less than standard` : `${digits(1 / times)}× more than standard`;
};

const shapeText = (s) => {
  if (!s) return '';
  const heads = s.num_heads + (s.num_kv_heads === s.num_heads ? '' : '/' + s.num_kv_heads);
  const dim = s.head_dim + (s.head_dim_v === s.head_dim ? '' : '/' + s.head_dim_v);
  return `${s.dtype} b${s.batch} ${s.seqlen_q}×${s.seqlen_k} h${heads} d${dim}` +
      (s.causal ? ' causal' : '') + (s.layout === 'THD' ? ' THD' : '');
};
