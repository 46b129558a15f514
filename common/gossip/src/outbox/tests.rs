use super::*;
use crate::codec::Decoder;

fn hashes(range: std::ops::Range<u64>) -> Vec<SequenceHash> {
    range.map(SequenceHash).collect()
}

fn stored(range: std::ops::Range<u64>) -> [LevelDelta; 3] {
    let [mut gpu, cpu, storage] = <[LevelDelta; 3]>::default();
    gpu.stored = hashes(range);
    [gpu, cpu, storage]
}

fn decode(bytes: &[u8]) -> FromSidecar {
    let mut decoder = Decoder::new();
    decoder.push(bytes);
    decoder.next().unwrap().unwrap()
}

/// All that a cursor gets without a snapshot: `w0:3` = delta of worker 0 with seq 3.
fn polled(outbox: &Outbox, cursor: &mut Cursor) -> String {
    let mut out = Vec::new();
    loop {
        out.push(match outbox.poll(cursor) {
            Next::Frame(bytes) => match decode(&bytes) {
                FromSidecar::Delta(delta) => format!("w{}:{}", delta.worker, delta.seq),
                other => panic!("{other:?}"),
            },
            Next::NeedSnapshot { worker, epoch, seq } => {
                cursor.snapshot_taken(worker, epoch, seq);
                format!("w{worker} snapshot {epoch}/{seq}")
            }
            Next::Idle => return out.join(" "),
        });
    }
}

fn outbox(frames: usize) -> Outbox {
    Outbox::new(&[10, 20], RingLimits { bytes: 1 << 16, frames })
}

#[test]
fn a_new_balancer_gets_snapshots_then_deltas_by_turns() {
    let (mut outbox, mut cursor) = (outbox(9), Cursor::default());
    assert_eq!(outbox.push(0, stored(1..3)), 1);
    assert_eq!(polled(&outbox, &mut cursor), "w0 snapshot 10/1 w1 snapshot 20/0");
    for _ in 0..2 {
        outbox.push(0, stored(1..2));
        outbox.push(1, stored(1..2));
    }
    assert_eq!(polled(&outbox, &mut cursor), "w0:2 w1:1 w0:3 w1:2");
    assert_eq!(outbox.watermark(0), Some((10, 3)));
}

#[test]
fn nothing_to_say_is_no_frame() {
    let mut outbox = outbox(9);
    assert_eq!(outbox.push(0, Default::default()), 0);
    assert_eq!(outbox.push(7, stored(1..2)), 0);
}

#[test]
fn a_balancer_behind_the_ring_falls_to_a_snapshot_and_the_ring_stays_bounded() {
    let (mut outbox, mut cursor) = (outbox(3), Cursor::default());
    polled(&outbox, &mut cursor);
    for _ in 0..3 {
        outbox.push(0, stored(1..2));
    }
    let mut quick = cursor.clone();
    assert_eq!(polled(&outbox, &mut quick), "w0:1 w0:2 w0:3");
    outbox.push(0, stored(1..2));
    assert_eq!(polled(&outbox, &mut quick), "w0:4");
    assert_eq!(polled(&outbox, &mut cursor), "w0 snapshot 10/4");
    assert_eq!(outbox.rings[0].frames.len(), 3);
    outbox.push(0, stored(0..10_000));
    assert_eq!((outbox.rings[0].frames.len(), outbox.rings[0].bytes), (0, 0));
    assert_eq!(polled(&outbox, &mut cursor), "w0 snapshot 10/5");
}

#[test]
fn a_reset_and_a_resync_need_a_snapshot() {
    let (mut outbox, mut cursor) = (outbox(9), Cursor::default());
    polled(&outbox, &mut cursor);
    outbox.push(0, stored(1..2));
    outbox.reset(0, 11);
    assert_eq!(polled(&outbox, &mut cursor), "w0 snapshot 11/0");
    cursor.resync(1);
    cursor.resync(9);
    assert_eq!(polled(&outbox, &mut cursor), "w1 snapshot 20/0");
}

#[test]
fn a_long_delta_is_split_in_order() {
    let n = MAX_HASHES_PER_FRAME as u64;
    let mut levels = stored(0..n + 5);
    levels[0].removed = hashes(0..n - 1);
    levels[2].removed = hashes(0..7);
    let whole: Vec<_> = levels.iter().flat_map(|l| [l.removed.clone(), l.stored.clone()]).collect();
    let parts = split(levels);
    let sizes: Vec<_> =
        parts.iter().map(|part| part.iter().map(|l| l.removed.len() + l.stored.len()).sum::<usize>()).collect();
    assert_eq!(sizes, [MAX_HASHES_PER_FRAME, MAX_HASHES_PER_FRAME, 11]);
    let joined: Vec<Vec<SequenceHash>> = (0..6)
        .map(|list| {
            let of = |part: &[LevelDelta; 3]| {
                let level = &part[list / 2];
                if list % 2 == 0 { level.removed.clone() } else { level.stored.clone() }
            };
            parts.iter().flat_map(of).collect()
        })
        .collect();
    assert_eq!(joined, whole);
}

#[track_caller]
fn check_snapshot(levels: [u64; 3], expected: &str) {
    let frames = snapshot_frames(1, 2, 3, levels.map(|count| hashes(0..count))).map(|bytes| match decode(&bytes) {
        FromSidecar::Snapshot(s) => {
            assert_eq!((s.worker, s.epoch, s.seq), (1, 2, 3));
            let flags = ["", "f"][usize::from(s.first)].to_owned() + ["", "l"][usize::from(s.last)];
            format!("{:?}{}{flags}", s.level, s.hashes.len())
        }
        other => panic!("{other:?}"),
    });
    assert_eq!(frames.collect::<Vec<_>>().join(" "), expected);
}

#[test]
fn a_repair_sends_its_buckets_alone() {
    let mut mask = [0; 32];
    mask[0] = 1;
    let levels = || [vec![SequenceHash(1), SequenceHash(1 << 56), SequenceHash(2)], vec![SequenceHash(3)], vec![]];
    let frames: Vec<_> = repair_frames(0, 2, 3, [mask, [0; 32], mask], levels()).map(|bytes| decode(&bytes)).collect();
    let [FromSidecar::Repair(head), FromSidecar::Snapshot(only)] = frames.as_slice() else { panic!("{frames:?}") };
    assert_eq!((head.buckets[0], only.first, only.last), (mask, false, true));
    assert_eq!(only.hashes, [SequenceHash(1), SequenceHash(2)]);
}

#[test]
fn a_cursor_is_at_what_it_was_given_last() {
    let (mut outbox, mut cursor) = (outbox(9), Cursor::default());
    assert!(!cursor.is_at(0, 10, 0));
    polled(&outbox, &mut cursor);
    assert!(cursor.is_at(0, 10, 0));
    outbox.push(0, stored(1..2));
    assert!(!cursor.is_at(0, 10, 1));
    polled(&outbox, &mut cursor);
    assert!(cursor.is_at(0, 10, 1) && !cursor.is_at(0, 11, 1) && !cursor.is_at(7, 10, 1));
}

#[test]
fn snapshots_are_chunked_across_levels() {
    check_snapshot([0, 0, 0], "Storage0fl");
    check_snapshot([4096, 0, 0], "Gpu4096fl");
    check_snapshot([5000, 0, 3], "Gpu4096f Gpu904 Storage3l");
    check_snapshot([0, 2, 2], "Cpu2f Storage2l");
}
