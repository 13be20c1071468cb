"use strict";

// A playground of one server. It asks what anybody could: /v1/models, /v1/chat/completions, /metrics.
const at = (id) => document.getElementById(id);
const POLL_MS = 1000, WINDOW = 60, LINE = 120;

let key = sessionStorage.getItem("key");
let model = null;
let messages = [];
let answering = null; // AbortController of the answer under way

function headers() {
  return key ? { authorization: `Bearer ${key}` } : {};
}

async function refusal(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `the server answered ${response.status}`;
  }
}

// The key, and which model there is.
async function enter() {
  let response;
  try {
    response = await fetch("v1/models", { headers: headers() });
  } catch {
    return say("the server does not answer", true);
  }
  at("key-form").hidden = response.status !== 401;
  at("send").disabled = !response.ok;
  if (response.status === 401) {
    at("key-error").textContent = key ? "This is not a key of this server." : "";
    key = null;
    sessionStorage.removeItem("key");
    at("key").focus();
    return;
  }
  if (!response.ok) return say(await refusal(response), true);
  if (key) sessionStorage.setItem("key", key);
  model = (await response.json()).data[0];
  at("model").textContent = `${model.id} · ${model.max_model_len.toLocaleString("en")} tokens`;
  at("text").focus();
}

at("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  key = at("key").value.trim();
  at("key").value = "";
  enter();
});

// Gauges, from /metrics: two snapshots make a rate.
const snapshots = [];
const rates = [];

function parse(text) {
  const values = {};
  for (const line of text.split("\n")) {
    const found = /^(\w+) (\S+)$/.exec(line);
    if (found) values[found[1]] = Number(found[2]);
  }
  return values;
}

function say(text, wrong) {
  at("state").textContent = text;
  at("state").classList.toggle("wrong", Boolean(wrong));
}

async function poll() {
  if (!model || document.hidden) return;
  let response;
  try {
    response = await fetch("metrics", { headers: headers() });
  } catch {
    return say("the server does not answer", true);
  }
  if (!response.ok) return say(await refusal(response), true);
  say("");
  snapshots.push({ time: performance.now(), values: parse(await response.text()) });
  if (snapshots.length > WINDOW + 1) snapshots.shift();
  show();
}

function show() {
  const last = snapshots.at(-1).values;
  at("running").textContent = last.llmq_requests_running;
  at("waiting").textContent = last.llmq_requests_waiting;
  at("used").textContent = last.llmq_kv_blocks_used.toLocaleString("en");
  at("total").textContent = last.llmq_kv_blocks_total.toLocaleString("en");
  at("kv").value = last.llmq_kv_blocks_used / last.llmq_kv_blocks_total;
  const asked = last.llmq_prefix_cache_queries_total;
  at("hits").textContent = asked ? `${((100 * last.llmq_prefix_cache_hits_total) / asked).toFixed(1)} %` : "–";
  showTtft(last);
  if (snapshots.length > 1) showRate(snapshots.at(-2), snapshots.at(-1));
}

function showTtft(last) {
  const [sum, count] = ["llmq_time_to_first_token_seconds_sum", "llmq_time_to_first_token_seconds_count"];
  const first = snapshots[0].values;
  const recent = last[count] > first[count];
  const n = recent ? last[count] - first[count] : last[count];
  const seconds = recent ? last[sum] - first[sum] : last[sum];
  at("ttft-of").textContent = recent ? "last minute" : "time since start";
  at("ttft").textContent = n ? duration(seconds / n) : "–";
}

function showRate(before, now) {
  const name = "llmq_generation_tokens_total";
  const rate = (1000 * (now.values[name] - before.values[name])) / (now.time - before.time);
  at("rate").textContent = rate < 100 ? rate.toFixed(1) : Math.round(rate).toLocaleString("en");
  rates.push(rate);
  if (rates.length > LINE) rates.shift();
  const highest = Math.max(...rates, 1);
  const points = rates.map((one, i) => `${LINE - rates.length + i + 1},${(31 - (30 * one) / highest).toFixed(1)}`);
  at("line").setAttribute("points", points.join(" "));
}

function duration(seconds) {
  return seconds < 1 ? `${Math.round(1000 * seconds)} ms` : `${seconds.toFixed(1)} s`;
}

// The chat. What a model says is text, never HTML.
function addTurn(role, text) {
  const turn = document.createElement("div");
  turn.className = `turn ${role}`;
  const body = turn.appendChild(document.createElement("p"));
  body.textContent = text;
  turn.appendChild(document.createElement("small"));
  at("turns").appendChild(turn);
  at("turns").scrollTop = at("turns").scrollHeight;
  return turn;
}

async function* events(response) {
  const decoder = new TextDecoder();
  let rest = "";
  for (let reader = response.body.getReader(); ; ) {
    const { done, value } = await reader.read();
    if (done) return;
    const lines = (rest + decoder.decode(value, { stream: true })).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data: ") || line === "data: [DONE]") continue;
      const event = JSON.parse(line.slice(6));
      if (event.error) throw new Error(event.error.message);
      yield event;
    }
  }
}

function request(text) {
  const system = at("system").value.trim();
  const body = { model: model.id, stream: true, stream_options: { include_usage: true } };
  body.messages = [...(system ? [{ role: "system", content: system }] : []), ...messages, { role: "user", content: text }];
  if (at("temperature").value) body.temperature = Number(at("temperature").value);
  if (at("max-tokens").value) body.max_tokens = Number(at("max-tokens").value);
  return {
    method: "POST",
    headers: { "content-type": "application/json", ...headers() },
    body: JSON.stringify(body),
    signal: answering.signal,
  };
}

async function answer(text) {
  const talk = messages; // a new conversation may begin meanwhile
  answering = new AbortController();
  busy(true);
  addTurn("user", text);
  const turn = addTurn("assistant", "");
  const [body, note] = turn.children;
  const started = performance.now();
  let first = null, tokens = 0, reason = null;
  try {
    const response = await fetch("v1/chat/completions", request(text));
    if (!response.ok) throw new Error(await refusal(response));
    for await (const event of events(response)) {
      tokens = event.usage ? event.usage.completion_tokens : tokens;
      for (const choice of event.choices) {
        reason = choice.finish_reason || reason;
        if (!choice.delta.content) continue;
        first ??= performance.now();
        body.textContent += choice.delta.content;
        at("turns").scrollTop = at("turns").scrollHeight;
      }
    }
    note.textContent = pace(tokens, ((first ?? performance.now()) - started) / 1000, (performance.now() - started) / 1000, reason);
  } catch (error) {
    if (error.name !== "AbortError") {
      turn.classList.add("wrong");
      note.textContent = error.message;
      return;
    }
    note.textContent = "stopped";
  } finally {
    answering = null;
    busy(false);
  }
  talk.push({ role: "user", content: text }, { role: "assistant", content: body.textContent });
}

function pace(tokens, ttft, total, reason) {
  const parts = [`${tokens} tokens`, `TTFT ${duration(ttft)}`];
  if (tokens > 1) parts.push(`${((tokens - 1) / Math.max(total - ttft, 1e-3)).toFixed(1)} tokens/s`);
  if (reason === "length") parts.push("cut by length");
  return parts.join(" · ");
}

function busy(yes) {
  at("send").disabled = yes;
  at("stop").hidden = !yes;
}

function submit(event) {
  event.preventDefault();
  const text = at("text").value.trim();
  if (!text || answering || !model) return;
  at("text").value = "";
  answer(text);
}

at("ask").addEventListener("submit", submit);
at("text").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) submit(event);
});
at("stop").addEventListener("click", () => answering?.abort());
at("reset").addEventListener("click", () => {
  answering?.abort();
  messages = [];
  at("turns").replaceChildren();
});

enter().then(poll);
setInterval(poll, POLL_MS);
