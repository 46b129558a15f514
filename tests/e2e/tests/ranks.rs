//! One engine of three data-parallel ranks behind one port, one sidecar: to the balancer three workers.
#![expect(clippy::unwrap_used, reason = "a test fails by panic")]

use std::collections::HashMap;
use std::time::Duration;

use bytes::Bytes;
use e2e::workload::{chat, image_part, picture, text_part, words};
use e2e::{Fleet, FleetConfig, Mode, eventually};
use serde_json::{Value, json};

const BLOCK: u64 = 32;
const RANKS: usize = 3;
const SOON: Duration = Duration::from_secs(20);

async fn start() -> Fleet {
    Fleet::start(FleetConfig { ranks: RANKS, ..FleetConfig::tiny(1, Mode::Precise) }).await.unwrap()
}

/// The turns of one person's chat: nothing in it is shared with another, every second turn brings a picture.
fn turns(user: u64) -> Vec<Bytes> {
    let mut messages = Vec::new();
    let mut turns = Vec::new();
    for turn in 0..4 {
        let mut parts = Vec::new();
        if turn % 2 == 0 {
            parts.push(image_part(&picture(user << 8 | turn, 448, 320)));
        }
        parts.push(text_part(&words(user << 16 | turn, 24)));
        messages.push(json!({"role": "user", "content": parts}));
        turns.push(chat(&format!("user-{user}"), &messages, 4));
        messages.push(json!({"role": "assistant", "content": words(user << 24 | turn, 12)}));
    }
    turns
}

/// Blocks confirmed on the chosen worker.
fn overlap(header: &str) -> u64 {
    header.split_once('/').and_then(|(held, _)| held.parse().ok()).unwrap_or_else(|| panic!("overlap {header:?}"))
}

/// Sends one turn; gives the worker's name and the overlap, after checking that the engine reused just that.
async fn ask(fleet: &Fleet, body: Bytes) -> (String, u64) {
    let answer = fleet.client.stream(&fleet.chat_url().unwrap(), body).await.unwrap();
    assert_eq!(answer.status, 200, "{}", answer.text);
    assert_eq!(answer.header("x-fovea-view"), "exact");
    let (held, (prompt, cached)) = (overlap(answer.header("x-fovea-overlap")), answer.tokens());
    assert_eq!(cached, held.min((prompt - 1) / BLOCK) * BLOCK, "overlap {held} of {prompt} tokens");
    fleet.settled().await.unwrap();
    (answer.header("x-fovea-worker").to_owned(), held)
}

async fn workers(fleet: &Fleet) -> HashMap<String, usize> {
    let url = format!("http://{}/debug/workers", fleet.balancer.addr("admin").unwrap());
    let told = fleet.client.get_json(&url).await.unwrap();
    let row = |row: &Value| {
        let rank = usize::try_from(row["dp_rank"].as_u64().unwrap()).unwrap();
        (row["worker"].as_str().unwrap().to_owned(), rank)
    };
    told["workers"].as_array().unwrap().iter().map(row).collect()
}

/// A count of each rank of the engine.
async fn by_rank(fleet: &Fleet, look: impl Fn(&Value) -> u64) -> Vec<u64> {
    let state = &fleet.engine_states().await.unwrap()[0];
    state["ranks"].as_array().unwrap().iter().map(look).collect()
}

fn cached(rank: &Value) -> u64 {
    rank["cached_blocks"].as_array().unwrap().len() as u64
}

/// Waits until the sidecar publishes for each rank as many blocks as that rank caches.
async fn published_is_cached(fleet: &Fleet) -> Vec<u64> {
    let url = format!("http://{}/debug/state", fleet.sidecars[0].addr("admin").unwrap());
    eventually("each rank's published blocks are its cached ones", SOON, || async {
        let told = fleet.client.get_json(&url).await?;
        let mut ranks: Vec<_> = told["workers"].as_array().into_iter().flatten().collect();
        ranks.sort_by_key(|worker| worker["rank"].as_u64());
        let published: Vec<_> = ranks.iter().map(|worker| worker["blocks"]["published"][0].as_u64().unwrap()).collect();
        let cached = by_rank(fleet, cached).await;
        Ok((published == cached).then_some(cached))
    })
    .await
    .unwrap()
}

#[tokio::test]
async fn chats_stick_to_their_rank_and_are_predicted_exactly() {
    let fleet = start().await;
    let workers = workers(&fleet).await;
    let mut ranks: Vec<_> = workers.values().copied().collect();
    ranks.sort_unstable();
    assert_eq!(ranks, [0, 1, 2]);
    let mut served = vec![0; RANKS];
    // Where a first picture goes is a matter of hashes, which change with the ports: as many chats as it takes.
    for user in 0..60 {
        if user >= 9 && served.iter().all(|count| *count > 0) {
            break;
        }
        let mut place = None;
        for (turn, body) in turns(user).into_iter().enumerate() {
            let (worker, held) = ask(&fleet, body).await;
            served[workers[&worker]] += 1;
            assert_eq!(place.get_or_insert_with(|| worker.clone()), &worker, "user {user} moved in turn {turn}");
            assert_eq!(held > 0, turn > 0, "user {user}, turn {turn}: {held} blocks");
        }
    }
    assert!(served.iter().all(|count| *count > 0), "all chats went to {served:?}");
    assert_eq!(by_rank(&fleet, |rank| rank["served"].as_u64().unwrap()).await, served);
    published_is_cached(&fleet).await;
}

#[tokio::test]
async fn a_restart_of_one_rank_voids_that_rank_alone() {
    let fleet = start().await;
    let workers = workers(&fleet).await;
    let mut chats: HashMap<usize, u64> = HashMap::new();
    for user in 0.. {
        let (worker, _) = ask(&fleet, turns(user)[0].clone()).await;
        chats.insert(workers[&worker], user);
        if chats.len() == RANKS {
            break;
        }
        assert!(user < 40, "40 chats on the ranks {:?} only", chats.keys());
    }
    let before = published_is_cached(&fleet).await;
    let fault = format!("http://{}/sim/fault", fleet.engines[0].addr("http").unwrap());
    fleet.client.post(&fault, json!({"fault": "restart", "rank": 1}).to_string()).await.unwrap();
    eventually("rank 1 has restarted", SOON, || async {
        Ok((by_rank(&fleet, |rank| rank["restarts"].as_u64().unwrap()).await == [0, 1, 0]).then_some(()))
    })
    .await
    .unwrap();
    assert_eq!(published_is_cached(&fleet).await, [before[0], 0, before[2]]);
    fleet.wait_for_workers(RANKS).await.unwrap();
    fleet.settled().await.unwrap();
    for rank in 0..RANKS {
        let (worker, held) = ask(&fleet, turns(chats[&rank])[1].clone()).await;
        if rank == 1 {
            assert_eq!(held, 0, "rank 1 holds nothing");
        } else {
            assert_eq!(workers[&worker], rank);
            assert!(held > 0, "rank {rank} has kept its blocks");
        }
    }
}
