//! The routing view: the tokens of the engine's expanded prompt, made to compute hashes; never sent to an engine.

use crate::hash::Records;
use crate::sglang::pair;
use crate::{BlockSize, MediaId, SequenceHash};

/// `count` copies of one token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    pub token: u32,
    pub count: u32,
}

/// The positions that one media item fills, as the engine keys them (vLLM: the whole replacement).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MediaSpan {
    /// First position, in tokens from the start of the prompt.
    pub start: u32,
    pub len: u32,
    pub id: MediaId,
}

impl MediaSpan {
    /// The position after the last.
    fn end(&self) -> u64 {
        u64::from(self.start) + u64::from(self.len)
    }
}

/// Run-length token view plus media spans in order of start.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RoutingView {
    runs: Vec<Run>,
    spans: Vec<MediaSpan>,
    len: u32,
}

impl RoutingView {
    pub fn with_capacity(runs: usize) -> Self {
        Self { runs: Vec::with_capacity(runs), ..Self::default() }
    }

    /// Appends `count` copies of `token`. Positions beyond `u32::MAX` are cut off: no engine has such a prompt.
    #[inline]
    pub fn push(&mut self, token: u32, count: u32) {
        let count = count.min(u32::MAX - self.len);
        if count == 0 {
            return;
        }
        self.len += count;
        match self.runs.last_mut() {
            Some(last) if last.token == token => last.count += count,
            _ => self.runs.push(Run { token, count }),
        }
    }

    /// Appends `count` positions of which the j-th is `cycle[j % cycle.len()]`: the pads of one SGLang media span. Nothing for an empty cycle.
    pub fn push_cycle(&mut self, cycle: &[u32], count: u32) {
        match cycle {
            [] => {}
            [token] => self.push(*token, count),
            _ => (0..count.min(u32::MAX - self.len))
                .zip(cycle.iter().cycle())
                .for_each(|(_, &token)| self.push(token, 1)),
        }
    }

    /// The view in which an EAGLE engine caches: position i is the pair of tokens i and i + 1, so it is one position shorter. No spans.
    pub fn to_pairs(&self) -> Self {
        let mut pairs = Self::with_capacity(2 * self.runs.len());
        for (index, run) in self.runs.iter().enumerate() {
            if run.count > 1 {
                pairs.push(pair(run.token, run.token), run.count - 1);
            }
            if let Some(next) = self.runs.get(index + 1) {
                pairs.push(pair(run.token, next.token), 1);
            }
        }
        pairs
    }

    /// Marks the `len` positions from `start` as filled by `id`. Spans come in order of start and are not empty.
    pub fn mark(&mut self, start: u32, len: u32, id: MediaId) {
        debug_assert!(self.spans.last().is_none_or(|last| last.start <= start), "spans in order of start");
        if len > 0 {
            self.spans.push(MediaSpan { start, len, id });
        }
    }

    /// Length of the prompt in tokens.
    pub fn len(&self) -> u32 {
        self.len
    }

    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    pub fn runs(&self) -> &[Run] {
        &self.runs
    }

    pub fn spans(&self) -> &[MediaSpan] {
        &self.spans
    }

    /// Forgets everything from position `len` on: what comes after it is not known exactly.
    pub fn truncate(&mut self, len: u32) {
        let mut end = 0;
        self.runs.retain_mut(|run| {
            let keep = len.saturating_sub(end).min(run.count);
            end += run.count;
            run.count = keep;
            keep > 0
        });
        self.spans.retain_mut(|span| {
            span.len = span.len.min(len.saturating_sub(span.start));
            span.len > 0
        });
        self.len = self.len.min(len);
    }

    /// Sequence hashes of all full blocks, chained from `root`, appended to `out`. O(tokens); one buffer, no allocation per block.
    pub fn sequence_hashes(&self, block_size: BlockSize, root: SequenceHash, out: &mut Vec<SequenceHash>) {
        let size = block_size.get();
        let blocks = self.len / size;
        out.reserve(blocks as usize);
        let mut tokens = Tokens { runs: &self.runs, rest: Run { token: 0, count: 0 } };
        let (mut spans, mut records, mut previous) = (&self.spans[..], Records::default(), root);
        for block in 0..blocks {
            let (start, end) = (block * size, (block + 1) * size);
            if !tokens.fill(records.begin(size as usize)) {
                debug_assert!(false, "runs are as long as the view");
                return;
            }
            for span in spans.iter().take_while(|span| span.start < end).filter(|span| span.end() > u64::from(start)) {
                let offset = i64::from(span.start) - i64::from(start);
                records.push_span(&span.id, i32::try_from(offset).unwrap_or(i32::MIN));
            }
            while let [first, rest @ ..] = spans
                && first.end() <= u64::from(end)
            {
                spans = rest;
            }
            if records.finish() || block + 1 == blocks {
                previous = records.chain(previous, out);
            }
        }
    }
}

/// What is left of a view's runs.
struct Tokens<'a> {
    runs: &'a [Run],
    rest: Run,
}

impl Tokens<'_> {
    /// Writes the next tokens, little-endian. False: there are too few.
    #[inline]
    fn fill(&mut self, mut out: &mut [[u8; 4]]) -> bool {
        while !out.is_empty() {
            // Text is runs of one token: eight at a time.
            if let (Some((eight, runs)), Some((room, _)), 0) =
                (self.runs.split_first_chunk::<8>(), out.split_first_chunk_mut::<8>(), self.rest.count)
                && eight.iter().fold(0, |other, run| other | (run.count ^ 1)) == 0
            {
                *room = eight.map(|run| run.token.to_le_bytes());
                (self.runs, out) = (runs, &mut out[8..]);
                continue;
            }
            if self.rest.count == 0 {
                let Some((next, runs)) = self.runs.split_first() else { return false };
                (self.rest, self.runs) = (*next, runs);
            }
            let take = out.len().min(self.rest.count as usize);
            out[..take].fill(self.rest.token.to_le_bytes());
            self.rest.count -= take as u32;
            out = &mut out[take..];
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use xxhash_rust::xxh3::xxh3_64;

    use super::*;
    use crate::root;

    fn hashes(view: &RoutingView, size: u32) -> Vec<SequenceHash> {
        let mut out = Vec::new();
        view.sequence_hashes(BlockSize::new(size).unwrap(), root("", ""), &mut out);
        out
    }

    fn view(tokens: &[u32], spans: &[(u32, u32)]) -> RoutingView {
        let mut view = RoutingView::default();
        tokens.iter().for_each(|&token| view.push(token, 1));
        spans.iter().for_each(|&(start, len)| view.mark(start, len, MediaId([7; 32])));
        view
    }

    #[test]
    fn only_full_blocks_count() {
        assert_eq!(hashes(&view(&[1, 2, 3, 4, 5], &[]), 2).len(), 2);
        assert_eq!(hashes(&view(&[1], &[]), 2), []);
    }

    #[test]
    fn a_span_changes_only_the_blocks_it_lies_over_and_those_after() {
        let tokens = [1, 2, 9, 9, 9, 9, 3, 4];
        let (plain, marked) = (hashes(&view(&tokens, &[]), 2), hashes(&view(&tokens, &[(2, 4)]), 2));
        assert_eq!(plain[0], marked[0]);
        assert!(plain[1..].iter().zip(&marked[1..]).all(|(a, b)| a != b));
    }

    #[test]
    fn truncation_keeps_the_hashes_before_it() {
        let tokens = [1, 2, 9, 9, 9, 9, 3, 4];
        let whole = view(&tokens, &[(2, 4)]);
        let mut cut = whole.clone();
        cut.truncate(5);
        assert_eq!((cut.len(), cut.spans()[0].len), (5, 3));
        assert_eq!(hashes(&cut, 2), hashes(&whole, 2)[..2]);
    }

    #[test]
    fn a_cycle_starts_at_its_first_token_in_every_call() {
        let mut cycled = view(&[1], &[]);
        cycled.push_cycle(&[7, 8, 9], 4);
        cycled.push_cycle(&[7, 8, 9], 2);
        cycled.push_cycle(&[5], 2);
        cycled.push_cycle(&[], 3);
        assert_eq!(cycled, view(&[1, 7, 8, 9, 7, 7, 8, 5, 5], &[]));
    }

    #[test]
    fn pairs_are_those_of_neighbours_and_one_fewer() {
        let tokens = [3, 3, 3, 4, 5, 5];
        let pairs: Vec<_> = tokens.windows(2).map(|two| pair(two[0], two[1])).collect();
        assert_eq!(view(&tokens, &[]).to_pairs(), view(&pairs, &[]));
        assert_eq!(view(&[1], &[]).to_pairs(), RoutingView::default());
    }

    #[test]
    fn equal_tokens_are_one_run() {
        assert_eq!(view(&[5, 5, 5, 6], &[]).runs(), [Run { token: 5, count: 3 }, Run { token: 6, count: 1 }]);
    }

    /// The definition, position by position: `docs/architecture.md`, "Routing view and hashes".
    fn naive(view: &RoutingView, size: u32, root: SequenceHash) -> Vec<SequenceHash> {
        let tokens: Vec<u32> =
            view.runs().iter().flat_map(|run| std::iter::repeat_n(run.token, run.count as usize)).collect();
        let (mut previous, mut out) = (root.0, Vec::new());
        for (start, block) in (0..).step_by(size as usize).zip(tokens.chunks_exact(size as usize)) {
            let mut bytes: Vec<u8> = block.iter().flat_map(|token| token.to_le_bytes()).collect();
            for span in view.spans().iter().filter(|span| span.start < start + size && span.start + span.len > start) {
                bytes.extend(span.id.0);
                bytes.extend(span.start.wrapping_sub(start).to_le_bytes());
            }
            let chained = [previous.to_le_bytes(), xxh3_64(&bytes).max(1).to_le_bytes()].concat();
            previous = xxh3_64(&chained).max(1);
            out.push(SequenceHash(previous));
        }
        out
    }

    fn views() -> impl Strategy<Value = RoutingView> {
        let count = prop_oneof![8 => Just(1), 1 => 1..6_u32, 1 => 1..400_u32];
        let runs = prop::collection::vec((0..50_u32, count), 0..600);
        let spans = prop::collection::vec((0..120_u32, 0..300_u32, any::<u8>()), 0..8);
        (runs, spans).prop_map(|(runs, spans)| {
            let mut view = RoutingView::default();
            runs.iter().for_each(|&(token, count)| view.push(token, count));
            let mut start = 0;
            for (gap, len, id) in spans {
                start += gap;
                view.mark(start, len.min(view.len().saturating_sub(start)), MediaId([id; 32]));
                // Some lie over each other.
                start += if id % 4 == 0 { len / 2 } else { len };
            }
            view
        })
    }

    proptest! {
        #[test]
        fn hashes_equal_the_definition(view in views(), size in prop_oneof![1..5_u32, Just(16), Just(32), 1..700_u32]) {
            prop_assert_eq!(hashes(&view, size), naive(&view, size, root("", "")));
        }
    }
}
