//! The queue behind `POST /kv_cache_events`: bounded, shared by all ranks, drained by whoever polls.

use super::Event;
use crate::cache::Batch;
use crate::engine::lock;
use crate::fault::Fault;
use crate::publisher::{Command, Published};
use serde_json::{Value, json};
use std::collections::VecDeque;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use tokio::sync::mpsc;

/// Events that nobody has taken yet. When it is full the oldest go, which shows as a jump of `event_id`.
#[derive(Debug)]
pub struct Queue {
    most: usize,
    /// `window_size` of every event.
    window: usize,
    events: Mutex<VecDeque<Value>>,
}

impl Queue {
    /// Keeps up to `most` events.
    pub fn new(most: usize, window: usize) -> Self {
        Self { most, window, events: Mutex::default() }
    }

    /// All events, oldest first; they are gone then.
    pub fn drain(&self) -> Vec<Value> {
        lock(&self.events).drain(..).collect()
    }

    /// Forgets the events of one rank; `None` = all.
    fn forget(&self, rank: Option<u32>) {
        let of = |event: &Value| event["attention_dp_rank"].as_u64();
        lock(&self.events).retain(|event| rank.is_some_and(|rank| of(event) != Some(rank.into())));
    }

    fn push(&self, event: Value) {
        let mut events = lock(&self.events);
        events.push_back(event);
        while events.len() > self.most {
            events.pop_front();
        }
    }
}

/// Numbers one rank's events and puts them into the queue.
pub struct Filler {
    queue: Arc<Queue>,
    published: Arc<Published>,
    /// Named in events with attention data parallelism only.
    rank: Option<u32>,
    next_id: u64,
    drop: u64,
    duplicate: u64,
    reorder: bool,
    held: Option<Value>,
}

impl Filler {
    /// Of a new rank.
    pub fn new(queue: Arc<Queue>, published: Arc<Published>, rank: Option<u32>) -> Self {
        Self { queue, published, rank, next_id: 0, drop: 0, duplicate: 0, reorder: false, held: None }
    }

    /// Fills until the engine is gone.
    pub async fn run(mut self, mut commands: mpsc::Receiver<Command>) {
        while let Some(command) = commands.recv().await {
            match command {
                Command::Batch(Batch::Polled(events)) => events.into_iter().for_each(|event| self.event(event)),
                Command::Batch(_) => {}
                Command::Fault(fault) => self.fault(&fault),
            }
            self.published.next_seq.store(self.next_id, Ordering::Relaxed);
            self.published.changes.note();
        }
    }

    fn event(&mut self, data: Event) {
        let mut event = json!({"event_id": self.next_id, "data": data, "window_size": self.queue.window});
        if let Some(rank) = self.rank {
            event["attention_dp_rank"] = rank.into();
        }
        self.next_id += 1;
        if self.drop > 0 {
            self.drop -= 1;
            return;
        }
        if std::mem::take(&mut self.reorder) {
            self.held = Some(event);
            return;
        }
        if self.duplicate > 0 {
            self.duplicate -= 1;
            self.queue.push(event.clone());
        }
        self.queue.push(event);
        if let Some(held) = self.held.take() {
            self.queue.push(held);
        }
    }

    fn fault(&mut self, fault: &Fault) {
        match fault {
            Fault::Drop { count } => self.drop = *count,
            Fault::Duplicate { count } => self.duplicate = *count,
            Fault::Reorder => self.reorder = true,
            Fault::Forget => self.queue.forget(self.rank),
            // Real servers send such items too.
            Fault::Garbage => self.queue.push(json!({})),
            Fault::Restart => {
                self.queue.forget(self.rank);
                let (queue, published) = (Arc::clone(&self.queue), Arc::clone(&self.published));
                *self = Self::new(queue, published, self.rank);
                self.published.restarts.fetch_add(1, Ordering::Relaxed);
            }
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Puts `events` events in after a fault; gives the ids that a poll sees.
    #[track_caller]
    fn check(fault: &Fault, events: usize, expect: &[u64]) {
        let queue = Arc::new(Queue::new(3, 4096));
        let mut filler = Filler::new(Arc::clone(&queue), Arc::default(), None);
        filler.fault(fault);
        (0..events).for_each(|_| filler.event(json!({"type": "removed"})));
        let ids: Vec<_> = queue.drain().iter().map(|event| event["event_id"].as_u64().unwrap_or(u64::MAX)).collect();
        assert_eq!(ids, expect, "{fault:?}");
        assert!(queue.drain().is_empty(), "a poll takes all");
    }

    #[test]
    fn a_full_queue_loses_the_oldest() {
        check(&Fault::Resume, 2, &[0, 1]);
        check(&Fault::Resume, 5, &[2, 3, 4]);
    }

    #[test]
    fn faults_touch_the_next_events() {
        check(&Fault::Drop { count: 1 }, 3, &[1, 2]);
        check(&Fault::Duplicate { count: 1 }, 2, &[0, 0, 1]);
        check(&Fault::Reorder, 3, &[1, 0, 2]);
        check(&Fault::Garbage, 1, &[u64::MAX, 0]);
    }
}
