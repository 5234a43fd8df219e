// The last calls, health, and the loop that asks for /status.json.

const POLL_MS = 2000;

const clock = (ms) => new Date(ms).toLocaleTimeString('en-GB', {hour12: false});

const callFacts = (call) => {
  const r = call.report, facts = [['ended', new Date(call.ended_ms).toISOString()], ['code', call.code]];
  if (call.shape) facts.push(['call', `${call.method}, ${shapeText(call.shape)}`]);
  else facts.push(['call', `${call.method}, header not valid`]);
  if (call.error) facts.push(['error', call.error]);
  if (!r && call.rejections) facts.push(['not taken', call.rejections.split(',').join(', ')]);
  facts.push(['handler', format.nanos(call.handler_ns)]);
  if (!r) return facts;
  facts.push(['path', `${r.path} (${r.flash ? 'flash' : 'standard'})`], ['kernel', r.kernel],
             ['device', r.device.toUpperCase() + (r.device === 'cuda' ? ' ' + r.device_index : '')],
             ['batch', r.fused_batch === 1 ? 'ran alone' : `${r.fused_batch} requests as one`],
             ['FLOPs', `${format.flops(r.flops)}, ${format.flopRate(r.achieved_tflops * 1e12)}`],
             ['bandwidth', `${format.byteRate(r.achieved_gb_per_s * 1e9)} of compulsory bytes`]);
  if (r.fraction_of_roofline > 0) facts.push(['roofline', format.share(r.fraction_of_roofline)]);
  if (r.trace_id) facts.push(['trace', r.trace_id], ['span', r.span_id]);
  return facts;
};

const STAGES = ['parse', 'gather', 'queue', 'device_queue', 'host_to_device', 'kernel', 'device_to_host', 'reply'];
const LEVELS = [['wire in', 'wire_request_bytes'], ['wire out', 'wire_response_bytes'],
  ['to device', 'host_to_device_bytes'], ['from device', 'device_to_host_bytes'],
  ['compulsory', 'compulsory_bytes'], ['tiles', 'tile_bytes'], ['standard', 'standard_bytes']];

const showCall = (call) => {
  const body = [el('dl', {class: 'facts'}, callFacts(call).map(([name, value]) =>
      [el('dt', {}, name), el('dd', {}, String(value))]))];
  const r = call.report;
  if (r) {
    const stages = STAGES.map((name) => [name.replaceAll('_', ' '), r.times[name + '_ns']])
        .filter(([name, ns]) => ns > 0 || !/device/.test(name));
    body.push(el('h3', {}, 'Time'), bars(stages.map(([name, ns]) => [name, ns, format.nanos(ns), 'c0'])),
              el('h3', {}, 'Bytes'), bars(LEVELS.filter(([name, key]) => r.traffic[key] > 0 || !/device/.test(name))
                  .map(([name, key]) => [name, r.traffic[key], format.bytes(r.traffic[key]),
                                         name === 'standard' ? 'c1' : name === 'tiles' ? 'c2' : 'c0'])),
              el('h3', {}, 'Faster paths that were not taken'),
              r.rejections.length === 0 ? el('p', {}, 'None: the fastest path ran.') :
              el('dl', {class: 'facts'}, r.rejections.map((x) =>
                  [el('dt', {}, x.path), el('dd', {}, x.reason + (x.detail ? ': ' + x.detail : ''))])));
  }
  $('call-title').textContent = 'Call ' + call.id;
  $('call-body').replaceChildren(...body);
  $('call').showModal();
};

const drawCalls = (status) => {
  const focused = document.activeElement?.dataset?.call;
  const header = [['time', ''], ['call', ''], ['method', 'roomy'], ['shape', 'roomy'], ['path', ''], ['kernel', 'n'],
    ['handler', 'n'], ['rate', 'n roomy']].map(([name, look]) => el('th', {class: look}, name));
  const rows = status.calls.map((call) => {
    const button = el('button', {type: 'button', class: 'link', 'data-call': call.id}, call.id);
    button.addEventListener('click', () => showCall(call));
    const r = call.report, look = !r ? 'bad' : r.flash ? 'flash' : 'standard';
    return el('tr', {}, el('td', {}, clock(call.ended_ms)), el('td', {}, button),
        el('td', {class: 'roomy'}, call.method), el('td', {class: 'roomy'}, shapeText(call.shape) || '–'),
        el('td', {}, el('span', {class: 'chip ' + look}, r ? r.path : call.code)),
        el('td', {class: 'n'}, r ? format.nanos(r.times.kernel_ns) : '–'),
        el('td', {class: 'n'}, format.nanos(call.handler_ns)),
        el('td', {class: 'n roomy'}, r ? format.flopRate(r.achieved_tflops * 1e12) : '–'));
  });
  $('calls').replaceChildren(...table(header, rows));
  $('calls-note').textContent = rows.length === 0 ? 'No call has come yet.' :
      `The last ${rows.length}, newest first; refused ones too. Choose one to see its report.`;
  if (focused) [...document.querySelectorAll('[data-call]')].find((b) => b.dataset.call === focused)?.focus();
};

const cell = (text, look = '') => el('td', {class: look || null}, text);
const chipCell = (text, look) => el('td', {}, el('span', {class: 'chip ' + look}, text));
// '#name' heads a column of numbers.
const heads = (...names) => names.map((name) =>
    name[0] === '#' ? el('th', {class: 'n'}, name.slice(1)) : el('th', {}, name));
const panel = (title, ...content) => el('div', {class: 'box'}, el('h3', {}, title), content);
const wide = (header, rows) => el('div', {class: 'wide'}, el('table', {}, table(header, rows)));

const none = (text) => el('p', {class: 'empty'}, text);

const pathRow = (p) => {
  const failed = p.self_test_failed.length;
  const test = failed > 0 ? chipCell(`${failed} failed`, 'bad') :
      p.self_test_passed > 0 ? chipCell(`${p.self_test_passed} passed`, 'flash') : cell('not run');
  const reasons = p.reasons.map((r) => r.reason + (r.detail ? ': ' + r.detail : ''));
  const words = [...reasons, ...p.self_test_failed].join('; ');
  const row = el('tr', {class: words ? 'open' : null}, cell(p.path),
                 chipCell(p.available ? 'available' : 'off', p.available ? 'flash' : ''), test);
  return [row, words ? el('tr', {}, el('td', {class: 'text', colspan: 3}, words)) : []];
};

const deviceRow = (d, errors) => {
  const memory = d.memory_limit_bytes ?
      `${format.bytes(d.memory_in_use_bytes)} of ${format.bytes(d.memory_limit_bytes)} in use` :
      d.memory_bytes ? format.bytes(d.memory_bytes) : '–';
  return el('tr', {}, cell(`${d.kind.toUpperCase()} ${d.index}`),
            chipCell(d.healthy ? 'healthy' : 'unhealthy', d.healthy ? 'flash' : 'bad'),
            cell(d.name || '–', 'text slim'), cell(d.isa || '–'), cell(memory), errors ? cell(d.error, 'text') : null);
};

const canaryPanel = (canary) => {
  if (!canary) return panel('Canary', none('Off (--canary-interval 0).'));
  const late = canary.age_s > 3 * canary.interval_s + 10;
  const ran = canary.last.length > 0 ? `last ran ${format.duration(canary.age_s)} ago` : 'has not run yet';
  return panel('Canary', wide(heads('device', 'pass', 'last result'), canary.last.map((r) =>
      el('tr', {}, cell(r.device), cell(r.pass), chipCell(r.ok ? 'right' : 'wrong', r.ok ? 'flash' : 'bad')))),
      el('p', {class: late ? 'lost' : 'note'}, `Every ${format.duration(canary.interval_s)}; ${ran}. ` +
         ['ok', 'failed', 'late'].map((r) => `${format.count(canary.runs[r])} ${r}`).join(', ') + '.'));
};

const drawHealth = (status) => {
  const errors = status.devices.some((d) => d.error);
  const load = status.load, totals = status.totals;
  const use = [['calls in flight', load.inflight_requests, load.inflight_requests_limit, format.count],
    ['bytes in flight', load.inflight_bytes, load.inflight_bytes_limit, format.bytes],
    ['workers busy', load.running, load.workers, format.count],
    ['queued', load.queued_requests, load.inflight_requests_limit, format.count]];
  const meters = el('div', {class: 'bars'}, use.map(([name, value, most, show]) => {
    const fill = el('div', {class: 'fill c0'});
    fill.style.width = Math.min(100, 100 * (ratio(value, most) ?? 0)).toFixed(1) + '%';
    fill.hidden = value === 0;
    return [el('span', {}, name), el('div', {class: 'track'}, fill),
            el('span', {class: 'number'}, `${show(value)} of ${show(most)}`)];
  }));
  const codes = Object.entries(totals.codes).map(([code, n]) =>
      el('tr', {}, chipCell(code, code === 'OK' ? 'flash' : 'standard'), cell(format.count(n), 'n')));
  const fallbacks = totals.fallbacks.map((f) =>
      el('tr', {}, cell(f.reason), cell(f.pass), cell(format.count(f.calls), 'n')));
  $('health').replaceChildren(
      panel('Paths', wide(heads('path', 'state', 'self-test'), status.paths.map(pathRow))),
      panel('Devices', wide(heads('device', 'state', 'name', 'ISA', 'memory', ...(errors ? ['error'] : [])),
                            status.devices.map((d) => deviceRow(d, errors)))),
      canaryPanel(status.canary), panel('Capacity', meters),
      panel('Answers since the start', codes.length > 0 ? wide(heads('code', '#calls'), codes) : none('None yet.')),
      panel('Not on flash since the start',
            fallbacks.length > 0 ? wide(heads('reason', 'pass', '#calls'), fallbacks) : none('No call.')));
};

const page = {paused: false, last: null, drawn: {}, heard: null};

// Draws a part only when what it shows has changed: a selection or an open menu survives.
const drawIfNew = (name, data, draw, status) => {
  const key = JSON.stringify(data);
  if (page.drawn[name] === key) return;
  page.drawn[name] = key;
  draw(status);
};

const draw = (status) => {
  const s = status.server;
  $('about').textContent = `version ${s.version}, commit ${s.commit}, up ${format.duration(s.uptime_s)}`;
  drawVerdict(status);
  drawCards(status);
  for (const chart of charts) chart.update(status.history);
  drawIfNew('plans', [status.plans_version, status.devices.map((d) => [d.name, d.healthy])], drawPlans, status);
  drawIfNew('traffic', [status.shapes, status.totals.paths], drawTraffic, status);
  drawIfNew('rooflines', [status.shapes, status.devices.map((d) => d.roofline_tflops)], drawRooflines, status);
  drawIfNew('calls', status.calls, drawCalls, status);
  drawIfNew('health', [status.load, status.paths, status.devices, status.canary, status.totals], drawHealth, status);
};

const showLost = (why) => {
  $('lost').hidden = !why;
  $('main').classList.toggle('stale', Boolean(why));
  if (why) $('lost').textContent = why;
};

const poll = async () => {
  if (!page.paused && !document.hidden) {
    let status = null;
    try {
      const reply = await fetch('/status.json', {cache: 'no-store', signal: AbortSignal.timeout(10000)});
      if (!reply.ok) throw new Error(`HTTP ${reply.status}`);
      status = await reply.json();
    } catch (error) {
      const since = page.heard ? ` since ${clock(page.heard)}` : '';
      showLost(`No answer from attnd${since} (${error.message}). What is shown is what it said last.`);
    }
    if (status) {
      page.last = status;
      page.heard = Date.now();
      showLost('');
      draw(status);
    }
  }
  setTimeout(poll, POLL_MS);
};

$('charts').replaceChildren(...charts.map((chart) => chart.figure));
$('call-close').addEventListener('click', () => $('call').close());
$('call').addEventListener('click', (event) => { if (event.target === $('call')) $('call').close(); });
$('pause').addEventListener('click', () => {
  page.paused = !page.paused;
  $('pause').setAttribute('aria-pressed', page.paused);
  $('pause').textContent = page.paused ? 'Go on' : 'Pause';
});
addEventListener('resize', () => {
  page.drawn.rooflines = null;
  if (page.last) draw(page.last);
});
poll();
