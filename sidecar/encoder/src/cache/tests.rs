use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use bytes::Bytes;

use super::*;
use crate::cache::flight::GetError;
use crate::tensor::{DType, Embedding, Expect, check};

const LONG: Duration = Duration::from_secs(60);

fn key(number: u8) -> CacheKey {
    CacheKey { media: MediaId([number; 32]), options: 0, fingerprint: [9; 32] }
}

/// `rows` × 16 bytes.
fn rows(rows: u32) -> Arc<Checked> {
    let data = Bytes::from(vec![1; rows as usize * 16]);
    let embedding = Embedding { rows, width: 8, dtype: DType::F16, data, grid_thw: None };
    Arc::new(check(embedding, &Expect { width: 8, rows: None, merge: None, dtype: None }).unwrap())
}

fn cache(bytes_max: u64) -> EmbeddingCache<&'static str> {
    EmbeddingCache::new(Settings { bytes_max, changes_max: 8 })
}

fn store(cache: &EmbeddingCache<&'static str>, number: u8, count: u32) {
    match cache.look(key(number)) {
        Look::Lead(leader) => leader.finish(rows(count)),
        other => panic!("{other:?}"),
    }
}

fn is_hit(cache: &EmbeddingCache<&'static str>, number: u8) -> bool {
    matches!(cache.look(key(number)), Look::Hit(_))
}

#[test]
fn the_longest_unused_go_when_bytes_are_short() {
    // An entry of 4 rows costs 320 bytes.
    let cache = cache(960);
    (1..=3).for_each(|number| store(&cache, number, 4));
    assert!(is_hit(&cache, 1));
    store(&cache, 4, 4);
    assert!(is_hit(&cache, 1) && !is_hit(&cache, 2) && is_hit(&cache, 3) && is_hit(&cache, 4));
    store(&cache, 5, 40);
    let stats = cache.stats();
    assert_eq!((stats.entries, stats.bytes, stats.evictions), (1, 896, 4), "{stats:?}");
    store(&cache, 6, 400);
    assert_eq!((cache.stats().too_large, cache.stats().entries), (1, 1), "more than the budget is not kept");
}

#[test]
fn changes_follow_the_keys_held_from_the_snapshot_on() {
    let cache = cache(640);
    store(&cache, 1, 4);
    let (keys, mut changes) = cache.changes();
    assert_eq!(keys, [key(1)]);
    store(&cache, 2, 4);
    store(&cache, 3, 4);
    let told: Vec<Change> = std::iter::from_fn(|| changes.try_recv().ok()).collect();
    assert_eq!(told, [Change::Stored(key(2)), Change::Evicted(key(1)), Change::Stored(key(3))]);
    (10..30).for_each(|number| store(&cache, number, 4));
    assert!(matches!(changes.try_recv(), Err(broadcast::error::TryRecvError::Lagged(_))), "told that it lagged");
}

#[test]
fn identities_cover_encoder_and_options() {
    let of = |media: u8, options: u64, fingerprint: u8| {
        CacheKey { media: MediaId([media; 32]), options, fingerprint: [fingerprint; 32] }.identity()
    };
    let all = [of(1, 0, 1), of(2, 0, 1), of(1, 0, 2), of(1, 1, 1), of(1, 2, 1)];
    for (index, one) in all.iter().enumerate() {
        assert!(!all[..index].contains(one), "{index}");
    }
    let mut framed = b"fovea-embedding".to_vec();
    framed.extend([[1; 32], [2; 32]].concat());
    assert_eq!(all[2].0, *blake3::hash(&framed).as_bytes());
}

#[tokio::test]
async fn one_encodes_and_all_others_get_its_rows() {
    let (cache, calls) = (cache(10_000), Arc::new(AtomicUsize::new(0)));
    let (open, gate) = watch::channel(false);
    let ask = || {
        let (cache, calls, mut gate) = (cache.clone(), Arc::clone(&calls), gate.clone());
        tokio::spawn(async move {
            let encode = || async move {
                calls.fetch_add(1, Ordering::Relaxed);
                gate.wait_for(|open| *open).await.map_err(|_| "closed")?;
                Ok(rows(3))
            };
            cache.get(key(1), LONG, encode).await
        })
    };
    let asked: Vec<_> = (0..10).map(|_| ask()).collect();
    while cache.stats().joins < 9 {
        tokio::task::yield_now().await;
    }
    open.send_replace(true);
    for one in asked {
        assert_eq!(one.await.unwrap().unwrap().embedding().rows, 3);
    }
    assert_eq!((calls.load(Ordering::Relaxed), cache.stats().misses), (1, 1));
    assert!(is_hit(&cache, 1));
}

#[tokio::test]
async fn a_leader_that_goes_away_hands_over() {
    let cache = cache(10_000);
    let Look::Lead(leader) = cache.look(key(1)) else { panic!("nobody leads") };
    let waiting: Vec<_> = (0..5)
        .map(|_| {
            let cache = cache.clone();
            tokio::spawn(async move { cache.get(key(1), LONG, || async { Ok(rows(2)) }).await })
        })
        .collect();
    while cache.stats().joins < 5 {
        tokio::task::yield_now().await;
    }
    drop(leader);
    for one in waiting {
        assert_eq!(one.await.unwrap().unwrap().embedding().rows, 2);
    }
    assert_eq!(cache.stats().misses, 2, "one more led, the others joined or hit");
}

#[tokio::test]
async fn a_failure_is_told_and_not_kept() {
    let cache = cache(10_000);
    let Look::Lead(leader) = cache.look(key(1)) else { panic!("nobody leads") };
    let Look::Join(joiner) = cache.look(key(1)) else { panic!("nobody joins") };
    leader.fail("bad image");
    assert_eq!(joiner.wait(LONG).await, Joined::Failed("bad image"));
    assert_eq!(cache.get(key(1), LONG, || async { Err("again") }).await, Err(GetError::Failed("again")));
    assert_eq!(cache.stats().entries, 0);
}

#[tokio::test(start_paused = true)]
async fn no_wait_is_without_bound() {
    let cache = cache(10_000);
    let Look::Lead(leader) = cache.look(key(1)) else { panic!("nobody leads") };
    let wait = Duration::from_millis(50);
    let said = cache.get(key(1), wait, || async { Ok(rows(1)) }).await;
    assert_eq!(said, Err(GetError::TooSlow { wait_ms: 50 }));
    drop(leader);
}
