use fovea_balancer_core::index::WorkerIndex;
use fovea_gossip::message::{EngineKind, HashScheme};

use super::*;

/// Workers of the models `names`, two each, every model a pool of its own.
fn workers(mode: Mode, names: &[&str]) -> Arc<Workers> {
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
