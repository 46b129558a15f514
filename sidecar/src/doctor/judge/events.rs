//! Events: are they sent, do they arrive, can lost ones be had again.

use fovea_gossip::message::EngineKind;

use crate::doctor::check::{Verdict, shown};
use crate::doctor::evidence::Evidence;
use crate::doctor::family::{Told, binds};
use crate::doctor::listen::{Link, Replay};
use crate::doctor::probe::{Probe, Seen};

/// Ranks as text: `rank 0`, `ranks 0, 1`.
fn ranks<'a>(links: impl IntoIterator<Item = &'a Link>) -> String {
    let all: Vec<String> = links.into_iter().map(|link| link.rank.to_string()).collect();
    format!("rank{} {}", if all.len() == 1 { "" } else { "s" }, all.join(", "))
}

/// The endpoint that a rank's engine connects to instead of binding it.
fn connects(told: &Told, rank: u32) -> Option<&str> {
    let of = |wanted| told.endpoints.iter().find(|(rank, _)| *rank == wanted).map(|(_, endpoint)| endpoint.as_str());
    of(rank).or_else(|| of(0)).filter(|endpoint| !told.forced_bind && !binds(endpoint))
}

/// The probe, when it was heard and was long enough to fill a block.
fn heard<'a>(evidence: &'a Evidence<'_>) -> Option<&'a Seen> {
    let size = evidence.found.ranks.first().map_or(0, |rank| rank.block_size);
    match &evidence.probe {
        Probe::Done(seen) if seen.listened && seen.reusable(size) > 0 => Some(seen.as_ref()),
        _ => None,
    }
}

pub fn events_on(evidence: &Evidence<'_>) -> Verdict {
    let (told, family, links) = (&evidence.told, evidence.family, &evidence.links);
    if evidence.found.facts.kind == EngineKind::TrtLlm && links.iter().any(|link| link.replay == Replay::Pull) {
        return match (&evidence.probe, heard(evidence)) {
            (_, Some(seen)) if seen.first.blocks > 0 => Verdict::good("the queue had the probe's blocks"),
            (_, Some(_)) => Verdict::bad(
                "the probe left nothing in the queue: it is off, or somebody else reads it, or its thread has ended",
                family.events_on,
            ),
            (Probe::Failed(_), None) => Verdict::unknown("the probe failed, and no page tells"),
            (_, None) => Verdict::unknown("only the probe can tell").remedy(family.events_on),
        };
    }
    let (on, off): (Vec<_>, Vec<_>) = links.iter().partition(|link| link.endpoint.is_some());
    if off.is_empty() {
        let endpoints: Vec<_> = on.iter().filter_map(|link| link.endpoint.as_deref()).collect();
        return Verdict::good(format!("{} at {}", ranks(on.iter().copied()), shown(&endpoints.join(", "))));
    }
    if let Some(endpoint) = off.iter().find_map(|link| connects(told, link.rank)) {
        return Verdict::good(format!("{} sent to {}", ranks(off), shown(endpoint)));
    }
    if told.tells_events {
        return Verdict::bad(format!("{}: no events are published", ranks(off)), family.events_on);
    }
    let remedy = format!("{}; then set events.endpoint and events.replay_endpoint in sidecar.yaml", family.events_on);
    Verdict::unknown(format!("{}: the engine has no page that tells", ranks(off))).remedy(remedy)
}

pub fn events_reachable(evidence: &Evidence<'_>) -> Verdict {
    let (told, family) = (&evidence.told, evidence.family);
    for link in evidence.links.iter().filter(|link| !link.connected) {
        if !link.bind
            && let Some(endpoint) = connects(told, link.rank)
        {
            let found = format!(
                "rank {}: {} has a concrete host, so the engine connects to it instead of binding",
                link.rank,
                shown(endpoint)
            );
            return Verdict::bad(found, family.bind_on);
        }
        let Some(endpoint) = link.endpoint.as_deref().map(shown) else { continue };
        return if link.bind {
            Verdict::bad(
                format!(
                    "rank {}: no engine connected to {endpoint}, or the address is taken (a sidecar that runs holds it)",
                    link.rank
                ),
                "let the engine's endpoint name this host and port, or take events.bind out of sidecar.yaml",
            )
        } else {
            Verdict::bad(
                format!("rank {}: cannot connect to {endpoint}", link.rank),
                "open that port from here to the engine, or set events.endpoint in sidecar.yaml to where it is published",
            )
        };
    }
    let connected: Vec<_> = evidence.links.iter().filter(|link| link.connected).collect();
    if connected.is_empty() {
        return Verdict::unknown("no rank is known to publish events");
    }
    if connected.iter().all(|link| link.replay == Replay::Pull) {
        return Verdict::good("fetched by POST /kv_cache_events");
    }
    match heard(evidence) {
        Some(seen) if seen.first.blocks == 0 => Verdict::bad(
            format!("connected, but a new prompt of {} tokens caused no event", seen.usage[0].prompt_tokens),
            "let topic and events.topic agree, and the endpoint be this engine's; without either, restart the engine and see its log for kv events",
        ),
        Some(_) => Verdict::good(format!("{}, and the probe's blocks came", ranks(connected))),
        None => Verdict::good(ranks(connected)),
    }
}

pub fn replay_on(evidence: &Evidence<'_>) -> Verdict {
    let published: Vec<_> = evidence.links.iter().filter(|link| link.endpoint.is_some()).collect();
    let mut found = Vec::new();
    for link in &published {
        let rank = link.rank;
        match &link.replay {
            Replay::Pull => {
                return Verdict::unknown(
                    "events are fetched: what is lost cannot be had again, and voids what is known",
                );
            }
            Replay::None => {
                let found = format!(
                    "rank {rank}: no replay endpoint, so what the engine held before and what is lost stays unknown"
                );
                return Verdict::bad(found, evidence.family.replay_on);
            }
            Replay::Failed(why) => {
                return Verdict::bad(
                    format!("rank {rank}: {why}"),
                    "let replay_endpoint have a host and port that are reachable from here, or set events.replay_endpoint in sidecar.yaml",
                );
            }
            Replay::Empty => found.push(format!("rank {rank}: answers, nothing published so far")),
            Replay::From(0) => found.push(format!("rank {rank}: from the beginning")),
            Replay::From(first) => {
                found.push(format!(
                    "rank {rank}: from batch {first}; what was stored before is unknown until it is stored anew"
                ));
            }
        }
    }
    if published.is_empty() {
        Verdict::unknown("no rank is known to publish events")
    } else {
        Verdict::good(found.join("; "))
    }
}
