use super::*;
use crate::codec::tests::{hello, learnt};
use crate::message::LevelDelta;

mod minors;
mod simulation;

fn snapshot(worker: u16, at: (u64, u64), flags: &str, hash: u64) -> FromSidecar {
    let (first, last) = (flags.contains('f'), flags.contains('l'));
    let hashes = vec![SequenceHash(hash)];
    FromSidecar::Snapshot(Snapshot { worker, epoch: at.0, seq: at.1, level: Tier::Gpu, first, last, hashes })
}

fn delta(worker: u16, at: (u64, u64)) -> FromSidecar {
    let mut levels = <[LevelDelta; 3]>::default();
    levels[1] = LevelDelta { removed: vec![SequenceHash(1)], stored: vec![SequenceHash(2)] };
    FromSidecar::Delta(Delta { worker, epoch: at.0, seq: at.1, levels })
}

fn words(changes: &[Change]) -> String {
    let word = |change: &Change| match change {
        Change::Hello(_) => "hello".to_owned(),
        Change::Begin { worker } => format!("begin{worker}"),
        Change::Removed { level, hashes, .. } => format!("-{level:?}{}", hashes[0].0),
        Change::Stored { level, hashes, .. } => format!("+{level:?}{}", hashes[0].0),
        Change::Live { epoch, seq, .. } => format!("live{epoch}/{seq}"),
        Change::Load(_) => "load".to_owned(),
        Change::Mend { worker, .. } => format!("mend{worker}"),
        Change::Repaired { worker, hashes } => format!("repaired{worker}:{hashes}"),
        Change::Digest { worker, .. } => format!("digest{worker}"),
        Change::Buckets(buckets) => format!("buckets{}", buckets.worker),
        Change::Embeddings(held) => format!("embeddings{}", held.stored.len()),
        Change::Learnt(facts) => format!("learnt{}", facts.len()),
        Change::Resync { worker } => format!("resync{worker}"),
    };
    changes.iter().map(word).collect::<Vec<_>>().join(" ")
}

/// Greets with two workers, applies the messages, compares the answers.
#[track_caller]
fn check(rows: impl IntoIterator<Item = (FromSidecar, &'static str)>) {
    let mut inbox = Inbox::new();
    inbox.apply(FromSidecar::Hello(hello(2))).unwrap();
    for (message, expected) in rows {
        let text = format!("{message:?}");
        assert_eq!(words(&inbox.apply(message).unwrap()), expected, "{text}");
    }
}

#[test]
fn a_snapshot_then_deltas_in_order_are_applied() {
    check([
        (snapshot(0, (5, 3), "f", 1), "begin0 +Gpu1"),
        (snapshot(0, (5, 3), "l", 2), "+Gpu2 live5/3"),
        (delta(0, (5, 4)), "-Cpu1 +Cpu2"),
        (delta(0, (5, 5)), "-Cpu1 +Cpu2"),
        (snapshot(0, (6, 0), "fl", 1), "begin0 +Gpu1 live6/0"),
        (delta(0, (6, 1)), "-Cpu1 +Cpu2"),
    ]);
}

#[test]
fn a_gap_a_repeat_and_another_epoch_ask_once() {
    for wrong in [(5, 5), (5, 3), (5, 2), (6, 4), (5, u64::MAX)] {
        check([
            (snapshot(0, (5, 3), "fl", 1), "begin0 +Gpu1 live5/3"),
            (delta(0, wrong), "resync0"),
            (delta(0, (5, 4)), ""),
            (snapshot(0, (5, 3), "l", 1), ""),
            (snapshot(0, (5, 9), "fl", 1), "begin0 +Gpu1 live5/9"),
            (delta(0, (5, 10)), "-Cpu1 +Cpu2"),
        ]);
    }
}

#[test]
fn what_does_not_fit_a_snapshot_under_way_asks() {
    for wrong in [delta(0, (5, 4)), snapshot(0, (5, 4), "", 1), snapshot(0, (6, 3), "l", 1)] {
        check([(snapshot(0, (5, 3), "f", 1), "begin0 +Gpu1"), (wrong, "resync0"), (snapshot(0, (5, 3), "l", 1), "")]);
    }
    check([(delta(1, (5, 1)), "resync1"), (delta(1, (5, 2)), "")]);
    check([(snapshot(1, (5, 1), "l", 1), "resync1")]);
}

#[test]
fn workers_are_apart() {
    check([
        (snapshot(0, (5, 3), "fl", 1), "begin0 +Gpu1 live5/3"),
        (snapshot(1, (5, 7), "f", 1), "begin1 +Gpu1"),
        (delta(0, (5, 9)), "resync0"),
        (snapshot(1, (5, 7), "l", 1), "+Gpu1 live5/7"),
        (FromSidecar::Load(Load { worker: 1, ..Load::default() }), "load"),
        (FromSidecar::Learnt(learnt()), "learnt4"),
        (FromSidecar::Heartbeat, ""),
    ]);
}

#[test]
fn facts_that_change_the_pool_void_the_set_and_names_do_not() {
    let mut names = hello(2);
    names.engine.lora_names.push("a".to_owned());
    names.draining = true;
    let mut pool = names.clone();
    pool.workers[0].block_size = 32;
    let mut engine = pool.clone();
    engine.engine.exif = false;
    let live = || (snapshot(0, (5, 3), "fl", 1), "begin0 +Gpu1 live5/3");
    check([
        live(),
        (snapshot(1, (5, 3), "fl", 1), "begin1 +Gpu1 live5/3"),
        (FromSidecar::Hello(names), "hello"),
        (FromSidecar::Hello(pool), "hello resync0"),
        live(),
        (FromSidecar::Hello(engine), "hello resync0 resync1"),
        (FromSidecar::Hello(hello(3)), "hello"),
        (delta(2, (5, 1)), "resync2"),
    ]);
}

fn digest(at: (u64, u64)) -> FromSidecar {
    FromSidecar::Digest(Digest { worker: 0, epoch: at.0, seq: at.1, levels: Default::default() })
}

fn repair(at: (u64, u64)) -> FromSidecar {
    FromSidecar::Repair(Repair { worker: 0, epoch: at.0, seq: at.1, buckets: Default::default() })
}

#[test]
fn a_digest_counts_at_its_watermark_and_tells_of_a_lost_delta_elsewhere() {
    check([
        (digest((5, 3)), ""),
        (snapshot(0, (5, 3), "f", 1), "begin0 +Gpu1"),
        (digest((5, 3)), ""),
        (snapshot(0, (5, 3), "l", 2), "+Gpu2 live5/3"),
        (digest((5, 3)), "digest0"),
        (digest((5, 4)), "resync0"),
        (digest((5, 4)), ""),
    ]);
}

#[test]
fn a_repair_becomes_live_as_a_snapshot_does() {
    let live = || (snapshot(0, (5, 3), "fl", 1), "begin0 +Gpu1 live5/3");
    check([
        live(),
        (repair((5, 3)), "mend0"),
        (snapshot(0, (5, 3), "", 7), "+Gpu7"),
        (snapshot(0, (5, 3), "l", 8), "+Gpu8 live5/3 repaired0:2"),
        (delta(0, (5, 4)), "-Cpu1 +Cpu2"),
        (repair((5, 3)), "resync0"),
        (snapshot(0, (5, 3), "l", 8), ""),
        (repair((5, 4)), ""),
    ]);
    check([live(), (repair((5, 3)), "mend0"), (delta(0, (5, 4)), "resync0")]);
    check([live(), (repair((5, 3)), "mend0"), (repair((5, 3)), "resync0")]);
    check([(repair((5, 3)), "resync0"), (snapshot(0, (5, 3), "l", 8), "")]);
}

#[test]
fn embeddings_pass_as_they_are() {
    let held = Embeddings { first: true, stored: vec![4, 5], removed: vec![] };
    check([(FromSidecar::Embeddings(held), "embeddings2")]);
}

#[test]
fn broken_protocol_is_named() {
    let mut inbox = Inbox::new();
    assert_eq!(inbox.apply(FromSidecar::Heartbeat), Err(ProtocolError::NoHello));
    let workers = WORKERS_MAX + 1;
    let many = hello(u32::try_from(workers).unwrap());
    assert_eq!(inbox.apply(FromSidecar::Hello(many)), Err(ProtocolError::TooManyWorkers { workers }));
    inbox.apply(FromSidecar::Hello(hello(1))).unwrap();
    let expected = Err(ProtocolError::UnknownWorker { worker: 1, workers: 1 });
    assert_eq!(inbox.apply(delta(1, (0, 1))), expected);
    assert_eq!(inbox.apply(FromSidecar::Load(Load { worker: 1, ..Load::default() })), expected);
    assert_eq!(inbox.watermark(0), None);
}
