use super::*;

/// (key, GPU overlap, waiting tokens, decode tokens)
type Row = (u64, u32, u64, u64);

fn candidates(rows: &[Row]) -> Vec<Candidate> {
    rows.iter()
        .map(|&(key, overlap, waiting_tokens, decode_tokens)| Candidate {
            key: WorkerKey(key),
            affinity: key,
            overlap_blocks: [overlap; 3],
            embedded: 0,
            waiting_tokens,
            decode_tokens,
        })
        .collect()
}

fn pick(rows: &[Row], query: &Query, settings: &Settings) -> String {
    match choose(&candidates(rows), query, settings, &mut Vec::new()) {
        Some(why) => format!("w{} reuses {}", why.key.0, why.reused_tokens),
        None => "none".to_owned(),
    }
}

/// Blocks of 16 tokens, mode precise.
#[track_caller]
fn check(rows: &[Row], prompt_tokens: u32, expect: &str) {
    let query = Query { prompt_tokens, block_tokens: 16, ..Query::default() };
    assert_eq!(pick(rows, &query, &Settings::default()), expect);
}

#[test]
fn overlap_wins_when_load_is_equal() {
    check(&[(1, 0, 0, 0), (2, 3, 0, 0)], 64, "w2 reuses 48");
}

#[test]
fn a_long_queue_outweighs_overlap() {
    check(&[(1, 0, 0, 0), (2, 3, 900, 0)], 64, "w1 reuses 0");
}

#[test]
fn own_work_weighs_more_than_a_wait() {
    check(&[(1, 0, 0, 0), (2, 3, 90, 0)], 64, "w2 reuses 48");
    check(&[(1, 0, 0, 0), (2, 3, 100, 0)], 64, "w1 reuses 0");
}

#[test]
fn at_least_one_token_is_computed() {
    check(&[(1, 4, 0, 0)], 64, "w1 reuses 48");
    check(&[(1, 99, 0, 0)], 65, "w1 reuses 64");
    check(&[(1, 1, 0, 0)], 0, "w1 reuses 0");
}

#[test]
fn decode_load_counts_by_its_weight() {
    check(&[(1, 1, 0, 1200), (2, 0, 0, 0)], 64, "w2 reuses 0");
    check(&[(1, 1, 0, 1000), (2, 0, 0, 0)], 64, "w1 reuses 16");
}

#[test]
fn a_hot_spot_loses_its_affinity() {
    check(&[(1, 1000, 0, 20_000), (2, 0, 0, 0), (3, 0, 0, 0)], 16_001, "w1 reuses 16000");
    let rows = [(1, 1000, 0, 90_000), (2, 0, 0, 0), (3, 0, 0, 0)];
    check(&[rows[0], (2, 1, 0, 0), rows[2]], 16_001, "w2 reuses 16");
}

#[test]
fn without_candidates_there_is_no_choice() {
    check(&[], 64, "none");
}

#[test]
fn images_still_to_encode_are_their_own_cost() {
    let query = Query { prompt_tokens: 100, block_tokens: 16, images: &[(10, 30)], ..Query::default() };
    let cost = |overlap| {
        let mut why = Vec::new();
        let settings = Settings { image_weight: 1.0, ..Settings::default() };
        choose(&candidates(&[(1, overlap, 0, 0)]), &query, &settings, &mut why);
        why[0].cost
    };
    assert_eq!([cost(0), cost(2), cost(3)], [260.0, 196.0, 104.0]);
}

#[test]
fn the_worker_whose_encoder_holds_the_image_is_preferred() {
    // Other text stands before the image, so that no worker holds a block of the prompt.
    let images = [(40, 300), (400, 300)];
    let query = Query { prompt_tokens: 800, block_tokens: 16, images: &images, media: Some(3), ..Query::default() };
    for holder in 0..4 {
        let mut rows = candidates(&[(1, 0, 0, 0), (2, 0, 0, 0), (3, 0, 0, 0), (4, 0, 0, 0)]);
        rows[holder].embedded = 0b10;
        let chosen = choose(&rows, &query, &Settings::default(), &mut Vec::new()).unwrap();
        assert_eq!((chosen.key, chosen.encode_tokens), (rows[holder].key, 30));
        // It is worth a short wait, not a long one.
        rows[holder].waiting_tokens = 50;
        assert_eq!(choose(&rows, &query, &Settings::default(), &mut Vec::new()).unwrap().key, rows[holder].key);
        rows[holder].waiting_tokens = 70;
        assert_ne!(choose(&rows, &query, &Settings::default(), &mut Vec::new()).unwrap().key, rows[holder].key);
    }
}

#[test]
fn slower_tiers_save_less() {
    let mut pair = candidates(&[(1, 0, 0, 0), (2, 0, 0, 0)]);
    pair[0].overlap_blocks = [0, 4, 4];
    pair[1].overlap_blocks = [3, 4, 4];
    let query = Query { prompt_tokens: 65, block_tokens: 16, ..Query::default() };
    let chosen = choose(&pair, &query, &Settings::default(), &mut Vec::new()).unwrap();
    assert_eq!((chosen.key, chosen.reused_tokens), (WorkerKey(2), 64));
}

#[test]
fn equal_images_meet_at_one_worker_and_other_images_spread() {
    let rows: Vec<Row> = (1..9).map(|key| (key, 0, 0, 0)).collect();
    let go = |media, turn| {
        let query = Query { prompt_tokens: 64, block_tokens: 16, media: Some(media), turn, ..Query::default() };
        pick(&rows, &query, &Settings::default())
    };
    assert!((0..20).all(|turn| go(7, turn) == go(7, 0)));
    assert!((0..20).any(|media| go(media, 0) != go(7, 0)));
}

#[test]
fn equal_workers_take_turns() {
    let rows: Vec<Row> = (1..5).map(|key| (key, 0, 0, 0)).collect();
    let picked = (0..64).map(|turn| {
        let query = Query { prompt_tokens: 64, block_tokens: 16, turn, ..Query::default() };
        pick(&rows, &query, &Settings::default())
    });
    assert_eq!(picked.collect::<std::collections::BTreeSet<_>>().len(), 4);
}

#[test]
fn other_modes_ignore_overlap() {
    let rows = [(1, 3, 10, 0), (2, 0, 0, 0), (3, 0, 5, 0)];
    let go = |mode, session, turn| {
        let query = Query { prompt_tokens: 64, block_tokens: 16, session, turn, ..Query::default() };
        pick(&rows, &query, &Settings { mode, ..Settings::default() })
    };
    assert_eq!(go(Mode::Load, None, 0), "w2 reuses 0");
    assert_eq!([0, 1, 2, 3].map(|t| go(Mode::RoundRobin, None, t)[..2].to_owned()), ["w1", "w2", "w3", "w1"]);
    assert_eq!(go(Mode::Session, None, 0), "w2 reuses 0");
    assert!((0..9).all(|turn| go(Mode::Session, Some(5), turn) == go(Mode::Session, Some(5), 0)));
}

#[test]
fn a_session_moves_only_when_its_worker_goes() {
    let rows: Vec<Row> = (1..9).map(|key| (key, 0, 0, 0)).collect();
    let settings = Settings { mode: Mode::Session, ..Settings::default() };
    for session in 0..50 {
        let query = Query { session: Some(session), ..Query::default() };
        let before = pick(&rows, &query, &settings);
        let fewer: Vec<Row> = rows.iter().copied().filter(|row| row.0 != 3).collect();
        assert!(before.starts_with("w3") || pick(&fewer, &query, &settings) == before);
    }
}
