//! Byte ranges whose removal takes members out of JSON objects and leaves valid JSON.

use std::ops::Range;

use crate::json::Member;

/// What is taken out of a client's body before an engine sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CutPolicy {
    /// `uuid` of media parts: a client must not choose an engine's cache identity.
    pub uuids: bool,
    /// `vllm_xargs.kv_cache_report_mode`: re-announced blocks would corrupt the accounting of stores and removals.
    pub report_mode: bool,
    /// `kv_transfer_params` and `ec_transfer_params`: they name hosts and blocks, and only a router may set them.
    pub transfer_params: bool,
}

impl Default for CutPolicy {
    /// Everything goes.
    fn default() -> Self {
        Self { uuids: true, report_mode: true, transfer_params: true }
    }
}

/// Ranges that remove the members named by `unwanted`: one per run of neighbours, with the comma that would be left over.
pub(crate) fn cut_members(members: &[Member<'_>], unwanted: impl Fn(&str) -> bool) -> Vec<Range<usize>> {
    let mut cuts = Vec::new();
    let mut at = 0;
    while at < members.len() {
        let run = members[at..].iter().take_while(|member| unwanted(&member.key)).count();
        if run == 0 {
            at += 1;
            continue;
        }
        let (first, last, next) = (&members[at], &members[at + run - 1], members.get(at + run));
        cuts.push(match (at.checked_sub(1).map(|before| &members[before]), next) {
            (Some(before), _) => before.span.end..last.span.end,
            (None, Some(next)) => first.span.start..next.span.start,
            (None, None) => first.span.start..last.span.end,
        });
        at += run;
    }
    cuts
}

#[cfg(test)]
mod tests;
