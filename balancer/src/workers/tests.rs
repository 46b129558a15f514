use fovea_gossip::message::{EngineKind, HashScheme};

use super::*;

/// Workers of the models `names`, two each, every model a pool of its own.
pub(super) fn workers(mode: Mode, names: &[&str]) -> Arc<Workers> {
    let settings = choose::Settings { mode, ..choose::Settings::default() };
    let workers = Arc::new(Workers::new(Freshness::default(), settings, 1000));
    for name in names.iter().flat_map(|name| [name, name]) {
        let engine = EngineFacts {
            kind: EngineKind::Vllm,
            version: String::new(),
            engine_model: (*name).to_owned(),
            served_names: Vec::new(),
            lora_names: Vec::new(),
            max_model_len: 0,
            exif: true,
            hash_scheme: HashScheme::Fovea1,
            hybrid: false,
        };
        let about = Description {
            pool: workers.new_pool(PoolFacts::new(&engine, 16)),
            index: WorkerIndex(0),
            name: "w".into(),
            url: "http://127.0.0.1:1".into(),
            dp_rank: 0,
            served_names: vec![(*name).to_owned()].into(),
            lora_names: Vec::new().into(),
            events: true,
            draining: false,
            by_load: false,
            capacity_tokens: 0,
            media_trusted: true,
        };
        workers.add(about, Instant::now());
    }
    workers
}

fn pool(workers: &Workers, model: &str) -> PoolRef {
    let Resolved::Pool { pool, .. } = workers.resolve(model, Instant::now()) else { panic!("no pool of {model}") };
    pool
}

fn route(workers: &Arc<Workers>, model: &str) -> Route {
    let ask = Ask { model, prompt_tokens: 40, hashes: &[SequenceHash(7), SequenceHash(8)], ..Ask::default() };
    workers.route(&pool(workers, model), &ask, None, Instant::now()).unwrap()
}

#[test]
fn turns_go_round_evenly_whatever_the_mix_of_models() {
    let workers = workers(Mode::RoundRobin, &["a", "b"]);
    let mut chosen = Vec::new();
    for _ in 0..4 {
        chosen.push(route(&workers, "a").booked.key);
        route(&workers, "b");
    }
    chosen.sort();
    assert_eq!((chosen[0], chosen[1]), (chosen[0], chosen[0]));
    assert_eq!((chosen[2], chosen[3]), (chosen[3], chosen[3]));
    assert_ne!(chosen[1], chosen[2]);
}

#[test]
fn only_a_request_that_was_answered_is_assumed_cached() {
    let workers = workers(Mode::Precise, &["a"]);
    let refused = route(&workers, "a");
    assert_eq!(refused.reused_tokens, 0);
    drop(refused);
    let answered = route(&workers, "a");
    assert_eq!(answered.reused_tokens, 0);
    answered.booked.started();
    drop(answered);
    let again = route(&workers, "a");
    assert_eq!((again.reused_tokens, again.confirmed_blocks), (32, 0));
}

/// One model of two workers without events.
fn blind(mode: Mode) -> Arc<Workers> {
    let workers = workers(mode, &["a"]);
    let mut all = Vec::new();
    workers.each(Instant::now(), |worker, _| all.push((worker.key, worker.about.clone())));
    for (key, about) in all {
        workers.describe(key, Description { events: false, ..about });
    }
    workers
}

fn ask(workers: &Arc<Workers>, hashes: &[u64], estimated_block_tokens: u32) -> Route {
    let hashes: Vec<_> = hashes.iter().copied().map(SequenceHash).collect();
    let ask = Ask { model: "a", prompt_tokens: 10_000, hashes: &hashes, estimated_block_tokens, ..Ask::default() };
    workers.route(&pool(workers, "a"), &ask, None, Instant::now()).unwrap()
}

/// (worker, reused tokens, precise, approximate) of an answered request.
fn serve(workers: &Arc<Workers>, hashes: &[u64], estimated_block_tokens: u32) -> (WorkerKey, u32, bool, bool) {
    let route = ask(workers, hashes, estimated_block_tokens);
    route.booked.started();
    (route.booked.key, route.reused_tokens, route.precise, route.approximate)
}

#[test]
fn turns_of_a_chat_stay_with_their_worker_where_no_events_tell() {
    for mode in [Mode::Precise, Mode::Approximate] {
        let workers = blind(mode);
        let (first, ..) = serve(&workers, &[1, 2], 0);
        assert_eq!(serve(&workers, &[1, 2, 3, 4], 0), (first, 32, false, true), "{mode:?}");
        assert_eq!(serve(&workers, &[1, 2, 3, 4, 5], 0), (first, 64, false, true), "{mode:?}");
    }
}

#[test]
fn what_is_known_decides_by_what_a_request_is_routed() {
    let seeing = workers(Mode::Precise, &["a"]);
    assert!(serve(&seeing, &[1, 2], 0).2);
    // Hashes that no event carries.
    let (first, ..) = serve(&seeing, &[7, 8], 64);
    assert_eq!(serve(&seeing, &[7, 8, 9], 64), (first, 128, false, true));
    let nothing = serve(&blind(Mode::Precise), &[], 0);
    assert_eq!((nothing.1, nothing.2, nothing.3), (0, false, false));
    let by_load = serve(&blind(Mode::Load), &[1, 2], 0);
    assert_eq!((by_load.2, by_load.3), (false, false));
}

#[test]
fn a_worker_that_comes_back_has_nothing_and_a_failed_request_leaves_nothing() {
    let workers = blind(Mode::Precise);
    drop(ask(&workers, &[1, 2], 0));
    assert_eq!(serve(&workers, &[1, 2], 0).1, 0);
    let (key, reused, ..) = serve(&workers, &[1, 2], 0);
    assert_eq!(reused, 32);
    let mut about = None;
    workers.each(Instant::now(), |worker, _| {
        about = Some(worker.about.clone()).filter(|_| worker.key == key).or(about.take())
    });
    workers.remove(key);
    workers.add(about.unwrap(), Instant::now());
    assert_eq!(serve(&workers, &[1, 2], 0).1, 0);
}
