//! The clients: chats that grow by pictures, at a steady rate, some of which leave.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use e2e::client::{Client, Streamed};
use e2e::workload::{chat, image_part, picture, text_part, words};
use serde_json::{Value, json};
use tokio::sync::Semaphore;
use tokio::time::{Instant, MissedTickBehavior, interval};

use super::Plan;

/// Requests at a time; more wait, so that a stall is seen as a lower rate and not as a heap of tasks.
const OPEN_MAX: usize = 512;
/// Chats that are under way.
const CHATS: u64 = 64;
/// Turns of a chat before a new one takes its place.
const TURNS: u64 = 6;
/// Pictures that all chats share, drawn once.
const PICTURES: u64 = 128;
/// One request in so many is given up by its client.
const LEAVES: u64 = 20;
/// After a kill: how long an answer may be cut, or refused because nobody is left.
const AFTERMATH: Duration = Duration::from_secs(3);

/// Counts shared by clients and churn.
#[derive(Debug, Default)]
pub struct Tally {
    pub requests: AtomicU64,
    pub errors: AtomicU64,
    pub cut: AtomicU64,
    pub left: AtomicU64,
    pub kills: AtomicU64,
    /// When the last kill was; milliseconds since `since`, 0 = never.
    last_kill_ms: AtomicU64,
    since: std::sync::OnceLock<Instant>,
}

impl Tally {
    fn now_ms(&self) -> u64 {
        let since = self.since.get_or_init(Instant::now);
        since.elapsed().as_millis() as u64
    }

    pub fn killed(&self) {
        self.kills.fetch_add(1, Ordering::Relaxed);
        self.last_kill_ms.store(self.now_ms().max(1), Ordering::Relaxed);
    }

    fn in_aftermath(&self) -> bool {
        let last = self.last_kill_ms.load(Ordering::Relaxed);
        last > 0 && self.now_ms() < last + AFTERMATH.as_millis() as u64
    }
}

/// Sends until `until`, then waits for the answers that are still to come.
pub async fn send(client: Client, url: String, plan: Plan, until: Instant, tally: Arc<Tally>) -> anyhow::Result<()> {
    let pictures: Arc<[String]> =
        (0..PICTURES).map(|i| picture((plan.seed << 20) | i, 224, 160)).collect::<Vec<_>>().into();
    let open = Arc::new(Semaphore::new(OPEN_MAX));
    let mut tick = interval(plan.pause);
    tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
    tally.now_ms();
    for turn in 0u64.. {
        tick.tick().await;
        if Instant::now() >= until {
            break;
        }
        let slot = Arc::clone(&open).acquire_owned().await?;
        let (client, url, tally) = (client.clone(), url.clone(), Arc::clone(&tally));
        let body = request(plan.seed, turn, &pictures);
        tokio::spawn(async move {
            one(&client, &url, body, turn, &tally).await;
            drop(slot);
        });
    }
    let _all = open.acquire_many(OPEN_MAX as u32).await?;
    Ok(())
}

async fn one(client: &Client, url: &str, body: Bytes, turn: u64, tally: &Tally) {
    let count = |counter: &AtomicU64| counter.fetch_add(1, Ordering::Relaxed);
    count(&tally.requests);
    let answer = client.stream(url, body);
    let answer = if turn % LEAVES == 7 {
        match tokio::time::timeout(Duration::from_millis(turn % 40), answer).await {
            Ok(answer) => answer,
            Err(_) => {
                count(&tally.left);
                return;
            }
        }
    } else {
        answer.await
    };
    match answer {
        Ok(answer) if whole(&answer) => {}
        // The stream had begun: a kill has cut it.
        Err(_) if tally.in_aftermath() => {
            count(&tally.cut);
        }
        Ok(answer) => {
            count(&tally.errors);
            eprintln!("unexpected: {} {}", answer.status, answer.text.chars().take(200).collect::<String>());
        }
        Err(error) => {
            count(&tally.errors);
            eprintln!("unexpected: {error:#}");
        }
    }
}

fn whole(answer: &Streamed) -> bool {
    answer.status.is_success() && answer.text.contains("data: [DONE]")
}

/// Request number `turn`: the next turn of one of the chats.
fn request(seed: u64, turn: u64, pictures: &[String]) -> Bytes {
    let (place, round) = (turn % CHATS, turn / CHATS);
    let (chat_number, turns) = (round / TURNS, round % TURNS + 1);
    let name = (seed << 48) | (chat_number << 16) | place;
    let mut messages = vec![json!({"role": "system", "content": format!("You look at pictures. {}", words(7, 40))})];
    for turn in 0..turns {
        let mut parts: Vec<Value> = Vec::new();
        if turn % 2 == 0 {
            let number = name.wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(turn) >> 7;
            parts.push(image_part(&pictures[(number % PICTURES) as usize]));
        }
        parts.push(text_part(&words(name.wrapping_mul(31).wrapping_add(turn), 20)));
        messages.push(json!({"role": "user", "content": parts}));
        if turn + 1 < turns {
            messages.push(json!({"role": "assistant", "content": words(name.wrapping_add(turn), 10)}));
        }
    }
    chat(&format!("user-{name}"), &messages, 8)
}
