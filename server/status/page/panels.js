// The parts of the page, each drawn from /status.json.

const MINUTE = 60;

// Sums of the history's columns over the last minute.
const lastMinute = (h) => {
  const recent = h.age_s.map((age, i) => i).filter((i) => h.age_s[i] < MINUTE);
  const of = (name) => sum(recent.map((i) => h[name][i]));
  const p99 = Math.max(0, ...recent.map((i) => h.handler_p99_s[i]));
  return {of, p99, calls: of('calls'), seconds: of('seconds')};
};

// Why a call was not on flash: the first reason against the last flash path that could have taken it.
const fallbackReason = (call, paths) => {
  const counts = new Set(paths.filter((p) => p.counts_as_flash).map((p) => p.path));
  if (!call.report || counts.has(call.report.path)) return null;
  const against = call.report.rejections.filter((r) => counts.has(r.path));
  if (against.length === 0) return 'UNKNOWN';
  const last = against[against.length - 1].path;
  return against.find((r) => r.path === last).reason;
};

const reasonsOf = (status) => {
  const found = new Map();
  for (const call of status.calls) {
    const reason = fallbackReason(call, status.paths);
    if (reason) found.set(reason, (found.get(reason) ?? 0) + 1);
  }
  return [...found].sort((a, b) => b[1] - a[1]).map(([reason, n]) => `${reason} (${n})`).join(', ');
};

const drawVerdict = (status) => {
  const minute = lastMinute(status.history), since = status.totals.flash;
  const recent = minute.calls > 0;
  const calls = recent ? minute.calls : since.calls;
  const share = recent ? ratio(minute.of('flash_flops'), minute.of('flops')) : ratio(since.flash_flops, since.flops);
  const byCalls = recent ? ratio(minute.of('flash_calls'), minute.calls) : ratio(since.flash_calls, since.calls);
  const when = recent ? 'of the last minute' : 'since the start (none in the last minute)';
  let kind = '', title = 'No call yet', text = 'Paths and reasons below are what the first call will meet.';
  if (calls > 0) {
    const n = `${format.count(calls)} call${calls === 1 ? '' : 's'} ${when}`;
    const reasons = reasonsOf(status);
    const why = reasons ? ` Not on flash among the last ${status.calls.length}: ${reasons}.` : '';
    if (byCalls === 1) {
      [kind, title, text] = ['flash', 'Flash is on', `All of ${n} ran on a fused path.`];
    } else if (byCalls === 0) {
      [kind, title, text] = ['standard', 'Flash is off', `None of ${n} ran on a fused path.${why}`];
    } else {
      [kind, title] = ['standard', `Flash is partly on: ${format.share(share)} of FLOPs`];
      text = `${format.share(byCalls)} of ${n} ran on a fused path.${why}`;
    }
  }
  if (!status.server.serving) {
    kind = 'bad';
    text = (calls > 0 ? title + '. ' : '') + text;
    title = status.server.draining ? 'Draining: new calls are refused' : 'Not serving: health checks fail';
  }
  $('verdict').className = 'verdict ' + kind;
  const [heading, words] = $('verdict').children;
  if (heading.textContent !== title) heading.textContent = title;
  if (words.textContent !== text) words.textContent = text;
};

const drawCards = (status) => {
  const minute = lastMinute(status.history), of = minute.of;
  const some = minute.calls > 0;
  const cards = [
    ['flash by FLOPs', format.share(ratio(of('flash_flops'), of('flops')))],
    ['flash by calls', format.share(ratio(of('flash_calls'), of('calls')))],
    ['calls', format.perSecond(ratio(of('requests'), minute.seconds))],
    ['not OK', format.share(ratio(of('errors'), of('requests')))],
    ['handler, mean', format.seconds(ratio(sum(status.history.age_s.map((age, i) => age < MINUTE ?
        status.history.handler_mean_s[i] * status.history.handler_calls[i] : 0)), of('handler_calls')))],
    ['worst second’s p99', some ? format.seconds(minute.p99) : '–'],
    ['rate while running', format.flopRate(ratio(of('flops'), of('kernel_s')))],
    ['compulsory bytes', format.byteRate(ratio(of('compulsory_bytes'), of('kernel_s')))],
    ['of the roofline', of('roofline_s') > 0 ? format.share(ratio(of('roofline_s'), of('kernel_s'))) : '–'],
    ['in flight now', format.count(status.load.inflight_requests)],
  ];
  $('cards').replaceChildren(...cards.map(([label, value]) =>
      el('div', {class: 'card'}, el('b', {}, value), el('span', {}, label))));
};

const charts = [
  new TimeChart('Share of flash', format.share, [
    ['by FLOPs', (h, i) => ratio(h.flash_flops[i], h.flops[i])],
    ['by calls', (h, i) => ratio(h.flash_calls[i], h.calls[i])]], {most: 1}),
  new TimeChart('Calls', format.perSecond, [
    ['answered', (h, i) => ratio(h.requests[i], h.seconds[i])],
    ['not OK', (h, i) => ratio(h.errors[i], h.seconds[i])]]),
  new TimeChart('Handler time', format.seconds, [
    ['p50', (h, i) => h.handler_calls[i] > 0 ? h.handler_p50_s[i] : null],
    ['p99', (h, i) => h.handler_calls[i] > 0 ? h.handler_p99_s[i] : null],
    ['mean', (h, i) => h.handler_calls[i] > 0 ? h.handler_mean_s[i] : null]]),
  new TimeChart('Memory bandwidth', format.byteRate, [
    ['compulsory', (h, i) => ratio(h.compulsory_bytes[i], h.kernel_s[i])],
    ['tiles', (h, i) => ratio(h.tile_bytes[i], h.kernel_s[i])]]),
  new TimeChart('Arithmetic', format.flopRate, [
    ['achieved', (h, i) => ratio(h.flops[i], h.kernel_s[i])]]),
  new TimeChart('Wire', format.byteRate, [
    ['in', (h, i) => ratio(h.wire_in_bytes[i], h.seconds[i])],
    ['out', (h, i) => ratio(h.wire_out_bytes[i], h.seconds[i])]]),
];

const letter = (i) => (i >= 26 ? letter(Math.floor(i / 26) - 1) : '') + String.fromCharCode(97 + i % 26);

const deviceText = (kind, devices) => {
  const names = new Map();
  for (const device of devices.filter((d) => d.kind === kind)) {
    const name = `${device.name || 'unnamed'}${device.isa ? `, ${device.isa}` : ''}`;
    const entry = names.get(name) ?? [];
    entry.push(device.index + (device.healthy ? '' : ' (unhealthy)'));
    names.set(name, entry);
  }
  const list = [...names].map(([name, indices]) => `${kind.toUpperCase()} ${indices.join(', ')}: ${name}`);
  return list.join('; ') || kind.toUpperCase();
};

const PASSES = ['forward', 'backward'];

const drawPlans = (status) => {
  const plans = status.plans;
  $('plans').replaceChildren(...plans.devices.map((kind) => {
    const used = [];  // indices of reason lists, in the order of their letters
    const mark = (index) => {
      if (plans.reasons[index].length === 0) return null;
      if (!used.includes(index)) used.push(index);
      return el('sup', {}, '\u202f' + letter(used.indexOf(index)));
    };
    const cells = plans.cells.filter((c) => c.device === kind);
    const dtypes = [...new Set(cells.map((c) => c.dtype))];
    if (cells.every((c) => !c.path && c.reasons === cells[0].reasons)) {
      return el('div', {class: 'kind'}, el('h3', {}, deviceText(kind, status.devices) + ': takes no call.'),
                plans.reasons[cells[0].reasons].map((r) => el('p', {class: 'note'}, r.sentence)));
    }
    const chip = (cell) => {
      if (!cell) return el('span', {});
      const look = !cell.path ? 'bad' : cell.flash ? 'flash' : 'standard';
      return el('span', {class: `chip ${look}${cell.takes_calls || !cell.path ? '' : ' idle'}`,
                         title: cell.kernel}, breakable(cell.path ?? 'none'), mark(cell.reasons));
    };
    const shapes = plans.shapes.map((shape, s) => el('div', {class: 'box'},
        el('h3', {}, shape.name), el('p', {class: 'note'}, shape.text),
        el('div', {class: 'grid'},
           el('span', {}), dtypes.map((d) => el('span', {class: 'head'}, d)),
           PASSES.map((pass) => [el('span', {class: 'head'}, pass), dtypes.map((dtype) =>
               chip(cells.find((c) => c.shape === s && c.pass === pass && c.dtype === dtype)))]))));
    const why = used.map((index, i) => [el('dt', {}, letter(i)),
        el('dd', {}, plans.reasons[index].map((r) => el('p', {}, r.sentence)))]);
    const first = cells.every((c) => c.takes_calls || !c.path) ? '' : ' Pale: calls go to another device first.';
    return el('div', {class: 'kind'}, el('h3', {}, deviceText(kind, status.devices) + '.' + first),
              el('div', {class: 'shapes'}, shapes), el('dl', {class: 'why'}, why));
  }));
};

const trafficBars = (s, path, flash) => bars([
  ['standard', s.standard_bytes, format.bytes(s.standard_bytes), 'c1'],
  [path, s.tile_bytes, format.bytes(s.tile_bytes), flash ? 'c2' : 'c1'],
  ['compulsory', s.compulsory_bytes, format.bytes(s.compulsory_bytes), 'c0'],
]);

const drawTraffic = (status) => {
  const boxes = [];
  const all = (name) => sum(status.totals.paths.map((p) => p[name]));
  if (status.totals.paths.length > 0) {
    const total = {standard_bytes: all('standard_bytes'), tile_bytes: all('tile_bytes'),
                   compulsory_bytes: all('compulsory_bytes')};
    boxes.push(el('div', {class: 'box'}, el('div', {class: 'about'},
        el('h3', {}, 'All calls since the start'),
        el('small', {}, lessThanStandard(total))), trafficBars(total, 'what ran', true)));
  }
  for (const s of status.shapes.slice(0, 7)) {
    boxes.push(el('div', {class: 'box'}, el('div', {class: 'about'},
        el('h3', {}, `${s.pass} ${shapeText(s.shape)}`),
        el('small', {}, `${s.calls} of the last ${status.calls.length} calls` +
           (s.flash ? ', ' + lessThanStandard(s) : ''))),
        trafficBars(s, s.path, s.flash)));
  }
  $('traffic').replaceChildren(boxes.length > 0 ? el('div', {class: 'rows'}, boxes) :
      el('p', {class: 'empty box'}, 'No call has been served yet.'));
};

const drawRooflines = (status) => {
  const seen = new Set(), figures = [];
  for (const device of status.devices) {
    const shapes = status.shapes.filter((s) => s.device === device.kind);
    // Devices of a kind are alike as a rule: one figure for each kind and pair of rates.
    const key = [device.kind, device.roofline_tflops, device.roofline_gb_per_s].join();
    if (seen.has(key)) continue;
    seen.add(key);
    const title = `${device.kind.toUpperCase()}: ${device.name || 'unnamed'}`;
    if (!(device.roofline_tflops > 0 && device.roofline_gb_per_s > 0)) {
      figures.push(el('figure', {}, el('h3', {}, title), el('p', {class: 'empty'}, 'Its rates were not measured.')));
      continue;
    }
    const canvas = el('div', {});
    const rates = [format.flopRate(device.roofline_tflops * 1e12), format.byteRate(device.roofline_gb_per_s * 1e9)];
    const roof = `${rates.join(' and ')} as measured at start-up` +
        (device.kind === 'cpu' ? ' on a small call: large ones may exceed it' : '');
    figures.push(el('figure', {}, el('h3', {}, title), el('p', {class: 'note'}, roof + '.'),
        el('div', {class: 'legend'}, el('span', {class: 'c2'}, 'flash'), el('span', {class: 'c1'}, 'standard'),
           el('span', {class: 'when'}, shapes.length > 0 ? 'one dot a shape' : 'no calls yet')), canvas));
    requestAnimationFrame(() => rooflineChart(canvas, device, shapes));
  }
  $('rooflines').replaceChildren(...figures);
};
