//! How often renderers are asked. Time is an argument.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

const WINDOW: Duration = Duration::from_secs(60);

/// At most so many asks in any minute.
#[derive(Debug)]
pub struct Pace {
    /// Those of the last minute, at most `per_minute`.
    asked: VecDeque<Instant>,
    per_minute: usize,
}

impl Pace {
    pub fn new(per_minute: u32) -> Self {
        Self { asked: VecDeque::new(), per_minute: per_minute.max(1) as usize }
    }

    /// When the next ask may go out, if not at once.
    pub fn wait_until(&self, now: Instant) -> Option<Instant> {
        let first = self.asked.front().filter(|_| self.asked.len() >= self.per_minute)?;
        Some(*first + WINDOW).filter(|due| *due > now)
    }

    /// An ask goes out now.
    pub fn note(&mut self, now: Instant) {
        if self.asked.len() >= self.per_minute {
            self.asked.pop_front();
        }
        self.asked.push_back(now);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_minute_sees_more_asks_than_allowed() {
        let (mut pace, start) = (Pace::new(3), Instant::now());
        let (mut now, mut sent) = (start, Vec::new());
        while sent.len() < 20 {
            match pace.wait_until(now) {
                None => {
                    pace.note(now);
                    sent.push(now);
                    now += Duration::from_secs(7);
                }
                Some(due) => now = due,
            }
        }
        for window in sent.windows(4) {
            assert!(window[3] - window[0] >= WINDOW);
        }
        assert!(sent[19] - start <= WINDOW * 7, "no slower than it must be");
    }
}
