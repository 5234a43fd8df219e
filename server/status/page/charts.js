// Charts over time, and the roofline. Drawn at the size they have, so that text stays readable.

const HEIGHT = 150, LEFT = 80, RIGHT = 12, TOP = 8, BOTTOM = 20;

// Round steps that divide 0 to `most` into two to five parts; binary for bytes would not read better.
const ticksTo = (most) => {
  const raw = most / 4, size = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].map((m) => m * size).find((s) => s >= raw);
  const ticks = [];
  for (let i = 0; i * step < most + step * 0.999; ++i) ticks.push(i * step);
  return ticks;
};

const path = (points) => {
  let d = '', pen = false;
  for (const point of points) {
    if (point === null) { pen = false; continue; }
    d += (pen ? 'L' : 'M') + point[0].toFixed(1) + ' ' + point[1].toFixed(1);
    // A point between gaps would be invisible without a length.
    if (!pen) d += 'h0';
    pen = true;
  }
  return d;
};

// How many seconds the charts show: as much as there is, up to four minutes.
const spanOf = (history) => {
  const oldest = Math.max(0, ...history.age_s);
  return [60, 120, 240].find((span) => oldest <= span * 1.05) ?? 240;
};

// A chart of `series`, [[label, function of (history, i) giving a number or null], …]. Pointing at it
// shows the values there. update(history) draws anew.
class TimeChart {
  constructor(title, show, series, options = {}) {
    this.show = show;
    this.series = series;
    this.options = options;
    this.pointed = null;  // age of the sample that is pointed at
    this.legend = el('div', {class: 'legend'});
    this.canvas = el('div', {});
    this.figure = el('figure', {}, el('h3', {}, title), this.legend, this.canvas);
    this.title = title;
    this.canvas.addEventListener('pointermove', (event) => this.point(event));
    this.canvas.addEventListener('pointerleave', () => { this.pointed = null; this.draw(); });
  }

  update(history) {
    this.history = history;
    this.draw();
  }

  point(event) {
    if (!this.history || this.history.age_s.length === 0) return;
    const box = this.canvas.getBoundingClientRect();
    const share = (event.clientX - box.left - LEFT) / (box.width - LEFT - RIGHT);
    this.pointed = spanOf(this.history) * (1 - Math.min(1, Math.max(0, share)));
    this.draw();
  }

  draw() {
    const h = this.history;
    if (!h) return;
    const n = h.age_s.length, span = spanOf(h);
    const values = this.series.map(([, value]) => h.age_s.map((_, i) => value(h, i)));
    const known = values.flat().filter((v) => v !== null && Number.isFinite(v));
    const most = this.options.most ?? Math.max(...known, 0);
    const ticks = ticksTo(most > 0 ? most : 1), top = this.options.most ?? ticks[ticks.length - 1];
    const width = Math.max(200, this.canvas.clientWidth);
    const x = (age) => LEFT + (width - LEFT - RIGHT) * (1 - age / span);
    const y = (v) => TOP + (HEIGHT - TOP - BOTTOM) * (1 - v / top);

    let at = n - 1;
    if (this.pointed !== null) {
      for (let i = 0; i < n; ++i) {
        if (Math.abs(h.age_s[i] - this.pointed) < Math.abs(h.age_s[at] - this.pointed)) at = i;
      }
    }
    const latest = this.series.map(([label], s) => [label, n > 0 ? this.show(values[s][at]) : '–']);
    const when = this.pointed !== null && n > 0 ? format.duration(h.age_s[at]) + ' ago' : '';
    this.legend.replaceChildren(
        ...latest.map(([label, text], s) => el('span', {class: 'c' + s}, label + ' ', el('b', {}, text))),
        el('span', {class: 'when'}, when));

    const parts = [];
    const empty = known.length === 0;
    for (const tick of ticks) {
      if (tick > top * 1.0001) continue;
      parts.push(svg('line', {class: 'grid', x1: LEFT, x2: width - RIGHT, y1: y(tick), y2: y(tick)}));
      if (!empty && (most > 0 || tick === 0)) {
        parts.push(svg('text', {x: LEFT - 6, y: y(tick) + 4, 'text-anchor': 'end'},
                       tick === 0 ? '0' : this.show(tick)));
      }
    }
    for (let part = 0; part <= 4; ++part) {
      const age = span * part / 4;
      parts.push(svg('text', {
        x: x(age), y: HEIGHT - 4, 'text-anchor': part === 0 ? 'end' : part === 4 ? 'start' : 'middle',
      }, part === 0 ? 'now' : span <= 120 ? `−${age} s` : `−${age / 60} min`));
    }
    values.forEach((list, s) => {
      const points = list.map((v, i) => v === null || !Number.isFinite(v) || h.age_s[i] > span ?
          null : [x(h.age_s[i]), y(v)]);
      parts.push(svg('path', {class: `line c${s}`, d: path(points)}));
    });
    if (this.pointed !== null && n > 0) {
      parts.push(svg('line', {class: 'cursor', x1: x(h.age_s[at]), x2: x(h.age_s[at]), y1: TOP, y2: HEIGHT - BOTTOM}));
    }
    if (empty) {
      parts.push(svg('text', {class: 'ink', x: (LEFT + width) / 2, y: HEIGHT / 2, 'text-anchor': 'middle'},
                     'no calls yet'));
    }
    const label = `${this.title}: ` + latest.map(([name, text]) => `${name} ${text}`).join(', ');
    this.canvas.replaceChildren(svg('svg', {
      viewBox: `0 0 ${width} ${HEIGHT}`, height: HEIGHT, role: 'img', 'aria-label': label,
    }, parts));
  }
}
// Rate against intensity, both logarithmic: the roof that `device` has, and a dot for each shape.
const rooflineChart = (canvas, device, shapes) => {
  const peak = device.roofline_tflops * 1e12, copy = device.roofline_gb_per_s * 1e9;
  const dots = shapes.filter((s) => s.kernel_ns > 0 && s.flops > 0 && s.compulsory_bytes > 0).map((s) => ({
    shape: s, intensity: s.flops / s.compulsory_bytes, rate: s.flops / (s.kernel_ns * 1e-9),
  }));
  const width = Math.max(240, canvas.clientWidth), height = 260, bottom = 36;
  const ridge = peak / copy;
  const low = Math.floor(Math.log10(Math.min(ridge / 20, ...dots.map((d) => d.intensity))));
  const high = Math.ceil(Math.log10(Math.max(ridge * 20, ...dots.map((d) => d.intensity))));
  const rates = [...dots.map((d) => d.rate), peak, copy * 10 ** low];
  const least = Math.floor(Math.log10(Math.min(...rates))), most = Math.ceil(Math.log10(Math.max(...rates) * 1.2));
  const x = (v) => LEFT + (width - LEFT - RIGHT) * (Math.log10(v) - low) / (high - low);
  const y = (v) => TOP + (height - TOP - bottom) * (most - Math.log10(v)) / (most - least);
  const parts = [];
  for (let e = least; e <= most; ++e) {
    parts.push(svg('line', {class: 'grid', x1: LEFT, x2: width - RIGHT, y1: y(10 ** e), y2: y(10 ** e)}),
               svg('text', {x: LEFT - 6, y: y(10 ** e) + 4, 'text-anchor': 'end'}, withUnit(10 ** e, DECIMAL)));
  }
  for (let e = low; e <= high; ++e) {
    parts.push(svg('line', {class: 'grid', x1: x(10 ** e), x2: x(10 ** e), y1: TOP, y2: height - bottom}),
               svg('text', {x: x(10 ** e), y: height - bottom + 15, 'text-anchor': e === high ? 'end' : 'middle'},
                   digits(10 ** e)));
  }
  parts.push(svg('text', {x: (LEFT + width) / 2, y: height - 4, 'text-anchor': 'middle'}, 'FLOP per compulsory byte'));
  parts.push(svg('path', {class: 'roof', d: path([
    [x(10 ** low), y(copy * 10 ** low)], [x(ridge), y(peak)], [x(10 ** high), y(peak)],
  ])}));
  for (const dot of dots) {
    const look = 'dot ' + (dot.shape.flash ? 'c2' : 'c1');
    parts.push(svg('circle', {class: look, cx: x(dot.intensity), cy: y(dot.rate), r: 6},
        svg('title', {}, `${shapeText(dot.shape.shape)} ${dot.shape.pass}: ${format.flopRate(dot.rate)}`)));
  }
  canvas.replaceChildren(svg('svg', {
    viewBox: `0 0 ${width} ${height}`, height, role: 'img',
    'aria-label': `Roofline: ${dots.length} shapes against ${format.flopRate(peak)} and ${format.byteRate(copy)}`,
  }, parts));
};
