//! How one model of one pool stands with its engines' renderers: which page is asked, and when not. Time is an argument.

use std::time::{Duration, Instant};

use super::metrics::AskEnd;

/// Nobody answers, or what is answered is of no use: not asked for this long.
pub const OFF_FOR: Duration = Duration::from_secs(600);
/// Pause after the first error; it doubles with each.
const PAUSE_FIRST: Duration = Duration::from_secs(1);
const PAUSE_MAX: Duration = Duration::from_secs(60);

/// A page of vLLM's that shows an expanded prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Page {
    /// `/v1/chat/completions/render`: also tells the range that is keyed. Open with `--enable-scale-out` only.
    Render,
    /// `/tokenize`: tokens alone.
    Tokenize,
}

#[derive(Debug)]
pub struct Standing {
    page: Page,
    rests_until: Option<Instant>,
    failures: u32,
    /// An image becomes the same wherever it stands among others; `None` = not known.
    pub repeats: Option<bool>,
    /// Ends that were logged.
    told: Vec<AskEnd>,
}

impl Default for Standing {
    fn default() -> Self {
        Self { page: Page::Render, rests_until: None, failures: 0, repeats: None, told: Vec::new() }
    }
}

impl Standing {
    /// The page to be asked; `None` = not now.
    pub fn page(&self, now: Instant) -> Option<Page> {
        self.rests_until.is_none_or(|until| until <= now).then_some(self.page)
    }

    pub fn failures(&self) -> u32 {
        self.failures
    }

    /// Takes note of an ask's end. True = the other page may know.
    pub fn settle(&mut self, end: AskEnd, now: Instant) -> bool {
        match (end, self.page) {
            (AskEnd::Closed | AskEnd::TooLarge, Page::Render) => {
                self.page = Page::Tokenize;
                return true;
            }
            (AskEnd::Closed | AskEnd::Disagrees | AskEnd::Ambiguous, _) => {
                *self =
                    Self { rests_until: Some(now + OFF_FOR), told: std::mem::take(&mut self.told), ..Self::default() };
            }
            (AskEnd::Learnt | AskEnd::Repeats | AskEnd::FirstOnly | AskEnd::Refused | AskEnd::TooLong, _) => {
                self.failures = 0
            }
            (AskEnd::Connect | AskEnd::Status | AskEnd::TooSlow | AskEnd::TooLarge | AskEnd::Malformed, _) => {
                let pause = PAUSE_FIRST.saturating_mul(1 << self.failures.min(16)).min(PAUSE_MAX);
                self.rests_until = Some(now + pause);
                self.failures = self.failures.saturating_add(1);
            }
        }
        false
    }

    /// True = this end is new for this model.
    pub fn is_new(&mut self, end: AskEnd) -> bool {
        let new = !self.told.contains(&end);
        if new {
            self.told.push(end);
        }
        new
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_closed_page_is_left_for_the_other_and_two_for_none() {
        let (mut standing, now) = (Standing::default(), Instant::now());
        assert_eq!(standing.page(now), Some(Page::Render));
        assert!(standing.settle(AskEnd::Closed, now));
        assert_eq!(standing.page(now), Some(Page::Tokenize));
        assert!(!standing.settle(AskEnd::Closed, now));
        assert_eq!(standing.page(now + OFF_FOR - Duration::from_millis(1)), None);
        assert_eq!(standing.page(now + OFF_FOR), Some(Page::Render));
    }

    #[test]
    fn a_template_that_is_not_the_engines_is_not_asked_about_again_soon() {
        for end in [AskEnd::Disagrees, AskEnd::Ambiguous] {
            let (mut standing, now) = (Standing::default(), Instant::now());
            assert!(!standing.settle(end, now));
            assert_eq!((standing.page(now), standing.page(now + OFF_FOR)), (None, Some(Page::Render)));
        }
    }

    #[test]
    fn errors_wait_longer_each_time_and_an_answer_ends_that() {
        let (mut standing, mut now) = (Standing::default(), Instant::now());
        for failures in 0..9 {
            assert!(!standing.settle(AskEnd::TooSlow, now));
            let pause = Duration::from_secs(1 << failures).min(PAUSE_MAX);
            assert_eq!(standing.page(now + pause - Duration::from_millis(1)), None);
            now += pause;
            assert_eq!(standing.page(now), Some(Page::Render));
        }
        standing.settle(AskEnd::Refused, now);
        assert_eq!((standing.failures(), standing.page(now)), (0, Some(Page::Render)));
    }

    #[test]
    fn each_end_is_told_once() {
        let mut standing = Standing::default();
        let told = [AskEnd::Closed, AskEnd::Closed, AskEnd::Status].map(|end| standing.is_new(end));
        assert_eq!(told, [true, false, true]);
    }
}
