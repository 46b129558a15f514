//! Rows that no simulated engine gives: figures at the edge, and engines that contradict themselves.

use std::collections::BTreeSet;

use fovea_gossip::message::{EngineFacts, EngineKind, HashScheme};

use super::all;
use crate::config::Config;
use crate::doctor::evidence::{Evidence, Skew};
use crate::doctor::family::{Told, family};
use crate::doctor::host::Open;
use crate::doctor::listen::{Link, Marks, Replay};
use crate::doctor::probe::{Probe, Refused, Seen, Usage};
use crate::engine::discover::{Discovered, Rank};
use crate::engine::version::Version;

/// A sound engine of one rank, spoilt by `change`; then one check.
#[track_caller]
fn check(
    kind: EngineKind,
    change: impl FnOnce(&mut Evidence<'_>, &mut Seen),
    name: &str,
    ok: Option<bool>,
    text: &str,
) {
    let mut config = Config::default();
    config.limits.connections_max = 100;
    let facts = EngineFacts {
        kind,
        version: "0.32.0".into(),
        engine_model: "m".into(),
        served_names: vec!["m".into()],
        lora_names: Vec::new(),
        max_model_len: 4096,
        exif: true,
        hash_scheme: HashScheme::Fovea1,
        hybrid: false,
    };
    let rank = Rank { block_size: 16, ..Rank::default() };
    let usage = Usage { prompt_tokens: 100, cached_tokens: Some(96) };
    let marks = Marks {
        blocks: 6,
        media: BTreeSet::from(["u".to_owned()]),
        pads: BTreeSet::from([1_000_001]),
        block_sizes: BTreeSet::from([16]),
    };
    let mut seen = Seen {
        uuid: (kind == EngineKind::Vllm).then(|| "u".into()),
        usage: [usage; 2],
        listened: true,
        first: marks.clone(),
        again: (kind != EngineKind::Vllm).then_some(marks),
        ..Seen::default()
    };
    let endpoint = Some("tcp://10.0.0.7:5557".to_owned());
    let mut evidence = Evidence {
        config: &config,
        model: None,
        found: Discovered { facts, ranks: vec![rank] },
        version: Some(Version(0, 32, 0)),
        family: family(kind),
        told: Told { tells_events: true, prefix_caching: Some(true), ..Told::default() },
        links: vec![Link { rank: 0, endpoint, bind: false, connected: true, replay: Replay::From(0) }],
        probe: Probe::Skipped("replaced below"),
        open: Open { answered: true, ..Open::default() },
        skew: Some(Skew(0, 0)),
        files_max: Some(1024),
    };
    change(&mut evidence, &mut seen);
    if matches!(evidence.probe, Probe::Skipped("replaced below")) {
        evidence.probe = Probe::Done(Box::new(seen));
    }
    let found = all(&evidence).find(|check| check.name == name).unwrap();
    assert_eq!(found.ok, ok, "{found:?}");
    let whole = format!("{} => {}", found.found, found.remedy.as_deref().unwrap_or_default());
    assert!(whole.contains(text), "{found:?}");
}

#[test]
fn versions_that_nobody_tried_are_named_and_no_fault() {
    use EngineKind::{Sglang, TrtLlm, Vllm};
    check(Vllm, |_, _| {}, "engine", Some(true), "was run");
    check(Vllm, |e, _| e.version = Some(Version(0, 40, 0)), "engine", None, "not known");
    check(Sglang, |e, _| e.version = Some(Version(0, 5, 20)), "engine", Some(true), "read, not measured");
    check(Sglang, |e, _| e.version = Some(Version(0, 5, 24)), "engine", None, "not known");
    check(TrtLlm, |e, _| e.version = None, "engine", None, "does not tell");
}

#[test]
fn clocks_may_differ_by_two_seconds() {
    for (skew, ok, text) in [
        (Some(Skew(-2, -2)), Some(true), "within"),
        (Some(Skew(2, 4)), Some(true), "within"),
        (Some(Skew(3, 3)), Some(false), "3 s ahead"),
        (Some(Skew(-9, -4)), Some(false), "4 s behind"),
        (Some(Skew(-9, 9)), Some(true), "within"),
        (None, None, "no date"),
    ] {
        check(EngineKind::Vllm, |e, _| e.skew = skew, "clock", ok, text);
    }
}

#[test]
fn files_must_do_for_both_ends_of_each_connection() {
    check(EngineKind::Vllm, |e, _| e.files_max = Some(328), "limits", Some(true), "328 open files");
    check(EngineKind::Vllm, |e, _| e.files_max = Some(327), "limits", Some(false), "ulimit -n 328");
    check(EngineKind::Vllm, |e, _| e.files_max = None, "limits", Some(true), "not told");
    check(
        EngineKind::Vllm,
        |e, _| e.found.facts.max_model_len = 10_000_000,
        "limits",
        Some(false),
        "limits.body_max: 80000000B",
    );
}

#[test]
fn what_is_open_matters_where_others_reach_it() {
    let open = |e: &mut Evidence<'_>, outside: Option<&str>| {
        e.open.dangers = vec!["x is open"];
        e.open.outside = outside.map(str::to_owned);
    };
    check(EngineKind::Vllm, |e, _| open(e, None), "dangerous_endpoints", Some(true), "loopback only");
    check(
        EngineKind::Vllm,
        |e, _| open(e, Some("10.0.0.7:8200")),
        "dangerous_endpoints",
        Some(false),
        "--host 127.0.0.1",
    );
    check(EngineKind::Vllm, |e, _| e.open.answered = false, "dangerous_endpoints", None, "did not answer");
}

#[test]
fn an_engine_that_should_come_to_us_is_told_apart_from_one_that_is_away() {
    let cut = |e: &mut Evidence<'_>, bind, endpoint: &str| {
        e.links[0].connected = false;
        e.links[0].bind = bind;
        e.told.endpoints = vec![(0, endpoint.to_owned())];
    };
    let name = "events_reachable";
    check(EngineKind::Vllm, |e, _| cut(e, true, "tcp://sidecar:5557"), name, Some(false), "no engine connected");
    check(EngineKind::Vllm, |e, _| cut(e, false, "tcp://*:5557"), name, Some(false), "cannot connect");
    check(EngineKind::Sglang, |e, _| cut(e, false, "tcp://127.0.0.1:5557"), name, Some(false), "\"bind\":true");
    let forced = |e: &mut Evidence<'_>, _: &mut Seen| {
        cut(e, false, "tcp://127.0.0.1:5557");
        e.told.forced_bind = true;
    };
    check(EngineKind::Sglang, forced, name, Some(false), "cannot connect");
    let unlinked = |e: &mut Evidence<'_>, _: &mut Seen| {
        cut(e, false, "tcp://127.0.0.1:5557");
        e.links[0].endpoint = None;
    };
    check(EngineKind::Sglang, unlinked, "events_on", Some(true), "sent to tcp://127.0.0.1:5557");
}

#[test]
fn a_queue_is_judged_by_the_probe_alone() {
    let pull = |e: &mut Evidence<'_>| e.links[0].replay = Replay::Pull;
    let kind = EngineKind::TrtLlm;
    check(kind, |e, _| pull(e), "events_on", Some(true), "queue");
    check(kind, |e, _| pull(e), "replay_on", None, "fetched");
    let empty = |e: &mut Evidence<'_>, seen: &mut Seen| {
        pull(e);
        seen.first = Marks::default();
    };
    check(kind, empty, "events_on", Some(false), "event_buffer_max_size");
    let skipped = |e: &mut Evidence<'_>, _: &mut Seen| {
        pull(e);
        e.probe = Probe::Skipped("not probed");
    };
    check(kind, skipped, "events_on", None, "event_buffer_max_size");
}

#[test]
fn a_picture_is_known_again_by_its_marks() {
    let (id, repeat) = ("identity_honoured", "media_repeatable");
    let others = |_: &mut Evidence<'_>, seen: &mut Seen| {
        let again =
            Marks { pads: BTreeSet::from([7_000_000]), media: BTreeSet::from(["v".into()]), ..seen.first.clone() };
        seen.again = Some(again);
        seen.usage[1].cached_tokens = Some(16);
    };
    for (kind, remedy) in [(EngineKind::Sglang, "SGLANG_MM_SKIP_COMPUTE_HASH"), (EngineKind::TrtLlm, "by load")] {
        check(kind, |_, _| {}, id, Some(true), "same");
        check(kind, |_, _| {}, repeat, Some(true), "one identity");
        check(kind, others, id, Some(false), "other");
        check(kind, others, repeat, Some(false), remedy);
    }
    let pairs = |_: &mut Evidence<'_>, seen: &mut Seen| {
        seen.first.pads.clear();
        seen.again.iter_mut().for_each(|again| again.pads.clear());
    };
    check(EngineKind::Sglang, pairs, id, None, "no pads");
    check(EngineKind::Sglang, pairs, repeat, Some(true), "one identity");
    check(EngineKind::Vllm, |_, seen| seen.first.media.clear(), id, Some(false), "newer vLLM");
    let fault = |_: &mut Evidence<'_>, seen: &mut Seen| {
        seen.refused = Some(Refused { why: "answered 500".into(), fault: true });
    };
    check(EngineKind::Vllm, fault, id, Some(false), "plain text is answered");
}

#[test]
fn a_cache_that_reuses_nothing_is_found_though_it_is_switched_on() {
    let nothing = |_: &mut Evidence<'_>, seen: &mut Seen| seen.usage[1].cached_tokens = Some(0);
    check(EngineKind::Vllm, nothing, "prefix_caching_on", Some(false), "model.hybrid");
    check(EngineKind::Vllm, nothing, "identity_honoured", Some(false), "prefix_caching_on");
    let short = |e: &mut Evidence<'_>, seen: &mut Seen| {
        nothing(e, seen);
        e.found.ranks[0].block_size = 784;
        seen.first.block_sizes = BTreeSet::from([784]);
    };
    check(EngineKind::Vllm, short, "prefix_caching_on", Some(true), "on");
    check(EngineKind::Vllm, short, "block_size", Some(true), "784");
}

#[test]
fn usage_is_told_by_answers_before_pages() {
    let name = "usage_details";
    let silent = |e: &mut Evidence<'_>, seen: &mut Seen, told| {
        e.told.usage = told;
        seen.usage[1].cached_tokens = None;
    };
    check(EngineKind::Sglang, |e, seen| silent(e, seen, Some(false)), name, Some(false), "--enable-cache-report");
    check(EngineKind::Sglang, |e, seen| silent(e, seen, Some(true)), name, None, "switched on");
    check(EngineKind::TrtLlm, |e, seen| silent(e, seen, None), name, None, "events alone");
    let skipped = |e: &mut Evidence<'_>, _: &mut Seen| {
        e.told.usage = Some(false);
        e.probe = Probe::Skipped("not probed");
    };
    check(EngineKind::Sglang, skipped, name, Some(false), "--enable-cache-report");
}
