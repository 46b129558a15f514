//! One function per check: from evidence to a verdict, without asking anybody.

mod cache;
mod events;
mod host;
#[cfg(test)]
mod tests;

use super::NO_MODEL_STRING;
use super::check::{Check, Verdict, shown};
use super::evidence::Evidence;
use super::family::Traps;
use super::probe::{Probe, Refused};

type Judge = fn(&Evidence<'_>) -> Verdict;

/// The checks after `reachable`, by the names under which they are printed. Names and order stay.
const CHECKS: [(&str, Judge); 15] = [
    ("engine", engine),
    ("version_traps", version_traps),
    ("models", models),
    ("events_on", events::events_on),
    ("events_reachable", events::events_reachable),
    ("replay_on", events::replay_on),
    ("prefix_caching_on", cache::prefix_caching_on),
    ("block_size", cache::block_size),
    ("hash_options", cache::hash_options),
    ("usage_details", cache::usage_details),
    ("identity_honoured", cache::identity_honoured),
    ("media_repeatable", cache::media_repeatable),
    ("dangerous_endpoints", host::dangerous_endpoints),
    ("clock", host::clock),
    ("limits", host::limits),
];

pub fn all(evidence: &Evidence<'_>) -> impl Iterator<Item = Check> {
    CHECKS.iter().map(move |(name, judge)| judge(evidence).named(name))
}

/// When discovery failed: the check `engine`, and all after it untold.
pub fn nothing_known(engine: Verdict) -> impl Iterator<Item = Check> {
    let rest = CHECKS[1..].iter().map(|(name, _)| Verdict::unknown("not asked: see above").named(name));
    std::iter::once(engine.named(CHECKS[0].0)).chain(rest)
}

fn engine(evidence: &Evidence<'_>) -> Verdict {
    let (name, version) = (evidence.family.name, shown(&evidence.found.facts.version));
    let Some(known) = evidence.version else {
        return Verdict::unknown(format!("{name}, which does not tell its version"));
    };
    match (evidence.family.known)(known) {
        Ok(how) => Verdict::good(format!("{name} {version}: {how}")),
        Err(others) => Verdict::unknown(format!("{name} {version}: not known; {others}")),
    }
}

fn version_traps(evidence: &Evidence<'_>) -> Verdict {
    let at = Traps { version: evidence.version, told: &evidence.told, config: evidence.config };
    let traps = (evidence.family.traps)(&at);
    let texts: Vec<&str> = traps.iter().map(|trap| trap.what.as_str()).collect();
    let remedies: Vec<&str> = traps.iter().filter_map(|trap| trap.remedy).collect();
    match (evidence.version, texts.is_empty(), remedies.is_empty()) {
        (_, false, false) => Verdict::bad(texts.join("; "), remedies.join("; ")),
        (None, ..) => Verdict::unknown("the version is not told"),
        (Some(_), true, _) => Verdict::good("none known"),
        (Some(_), false, true) => Verdict::good(texts.join("; ")),
    }
}

fn models(evidence: &Evidence<'_>) -> Verdict {
    let facts = &evidence.found.facts;
    let (served, adapters) = (&facts.served_names, &facts.lora_names);
    let names = shown(&served.join(", "));
    if let Some(model) = evidence.model
        && !served.iter().chain(adapters).any(|name| name == model)
    {
        let remedy = "give one of them with --model, or start the engine with --served-model-name";
        return Verdict::bad(format!("no {} among {names}", shown(model)), remedy);
    }
    if facts.engine_model == NO_MODEL_STRING {
        let remedy =
            "set model.engine_model in sidecar.yaml to the engine's model directory, and give it with --config";
        return Verdict::bad(format!("{names}, model string not told"), remedy);
    }
    let adapters = if adapters.is_empty() { String::new() } else { format!(", {} LoRA adapters", adapters.len()) };
    let found = format!("{names}{adapters}, model string {}", shown(&facts.engine_model));
    if let Probe::Failed(Refused { why, fault: true }) = &evidence.probe {
        let remedy = "see the engine's log; if it is only busy, give a longer --timeout, or --no-probe";
        return Verdict::bad(format!("{found}; {why}"), remedy);
    }
    match facts.max_model_len {
        0 => Verdict::unknown(format!("{found}, longest sequence not told"))
            .remedy("set model.max_model_len in sidecar.yaml"),
        longest => Verdict::good(format!("{found}, longest sequence {longest} tokens")),
    }
}
