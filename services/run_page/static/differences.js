// The settings in which runs differ.

// These say where a run took place and what it is called.
const OWN = new Set(["run_id", "shared_dir", "jobgroup_token", "log_level"]);
const COMMIT_DIGITS = 10;
// The task, reward, method, rate and sizes of a run. Other settings come after these.
const IMPORTANT = [
  ...["model_name", "dataset", "dataset_config", "rollout", "environment", "opponent", "agent", "agent_command"],
  ...["reward_fn", "reward_model", "loss", "advantage", "aggregation", "importance_correction", "kl_coef", "mode"],
  ...["learning_rate", "lora_rank", "batch_size", "group_size", "updates_per_batch", "replay_groups"],
  ...["max_new_tokens", "agent_max_tokens", "max_prompt_tokens", "temperature", "num_epochs", "max_steps", "seed"],
];

/**
 * Returns the settings in which ``runs`` differ, as [{name, values}] with a text by run, the important ones first. A run
 * that does not record a setting does not differ in it. A setting that several components share is listed once.
 */
export function differences(runs) {
  const all = new Map(runs.map((run) => [run, settingsOf(run)]));
  const keys = [...new Set(runs.flatMap((run) => [...all.get(run).keys()]))];
  const byKey = new Map();
  for (const key of keys) {
    const values = new Map(runs.map((run) => [run, all.get(run).get(key)]));
    if (new Set([...values.values()].filter((value) => value !== undefined)).size < 2) continue;
    const [component, name] = key.split(" ");
    const same = [...byKey.values()].filter((other) => other.setting === name);
    if (same.some((other) => runs.every((run) => other.values.get(run) === values.get(run)))) continue;
    const title = name === "commit" ? name : name.toUpperCase();
    byKey.set(key, { setting: name, name: same.length ? `${title} of ${component}` : title, values });
  }
  const place = ({ setting }) => (IMPORTANT.includes(setting) ? IMPORTANT.indexOf(setting) : IMPORTANT.length);
  return [...byKey.values()].sort((a, b) => place(a) - place(b));
}

/** Returns a run's settings and commits as texts, by "component name". */
export function settingsOf({ components, summary }) {
  const texts = new Map();
  for (const [component, { settings: values, commit }] of Object.entries(components)) {
    for (const [name, value] of Object.entries(values ?? {})) if (!OWN.has(name)) texts.set(`${component} ${name}`, text(value));
    if (commit) texts.set(`${component} commit`, String(commit).slice(0, COMMIT_DIGITS));
  }
  const recorded = new Set([...texts.keys()].map((key) => key.split(" ")[1]));
  for (const [name, value] of [["model_name", summary.model], ["dataset", summary.dataset]]) {
    if (value && !recorded.has(name)) texts.set(`summary ${name}`, String(value));
  }
  return texts;
}

/** Returns the value of a setting as text; nothing for one that is not set. */
export function text(value) {
  if (value === null || value === undefined) return "";
  return typeof value === "object" ? JSON.stringify(value) : String(value);
}

/** Returns for each run the others whose settings are equal; none for a run that does not record its settings. */
export function equals(runs, differing) {
  const key = (run) => JSON.stringify(differing.map(({ values }) => values.get(run) ?? null));
  const hasSettings = (run) => Object.keys(run.components).length > 0;
  return new Map(runs.map((run) => [run, runs.filter((other) => other !== run && hasSettings(run) && hasSettings(other) && key(other) === key(run))]));
}
