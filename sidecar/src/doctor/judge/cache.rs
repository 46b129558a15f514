//! The prefix cache: is it on, in which units, and does it know a picture again.

use fovea_gossip::message::EngineKind;

use crate::doctor::check::{Verdict, shown};
use crate::doctor::evidence::Evidence;
use crate::doctor::probe::{Probe, Seen};

/// Block size of rank 0; 0 = not told.
fn size(evidence: &Evidence<'_>) -> u32 {
    evidence.found.ranks.first().map_or(0, |rank| rank.block_size)
}

/// The probe's results, or why there are none.
fn probed<'a>(evidence: &'a Evidence<'_>) -> Result<&'a Seen, Verdict> {
    match &evidence.probe {
        Probe::Done(seen) => Ok(seen.as_ref()),
        Probe::Skipped(why) => Err(Verdict::unknown(*why)),
        Probe::Failed(refused) => Err(Verdict::unknown(format!("the probe failed: {}", refused.why))),
    }
}

/// The probe's results where it carried a picture.
fn pictured<'a>(evidence: &'a Evidence<'_>) -> Result<&'a Seen, Verdict> {
    let seen = probed(evidence)?;
    match &seen.refused {
        None => Ok(seen),
        Some(refused) if refused.fault => Err(Verdict::bad(
            format!("a picture of 64 × 64 pixels: {}; plain text is answered", refused.why),
            "see the engine's log; a request as small as this must not fail",
        )),
        Some(refused) => Err(Verdict::unknown(format!("no picture was taken: {}", refused.why))),
    }
}

/// Of the second of two equal requests, in words and as a share: `None` = the engine does not tell.
fn reused(evidence: &Evidence<'_>, seen: &Seen) -> (String, Option<bool>) {
    let most = seen.reusable(size(evidence));
    match seen.usage[1].cached_tokens {
        Some(cached) => (format!("reused {cached} of {most} tokens"), (most > 0).then_some(cached > 0)),
        None => ("reuse is not told: see usage_details".into(), None),
    }
}

/// Everything that can be reused was, the picture with it.
fn reused_whole(evidence: &Evidence<'_>, seen: &Seen) -> bool {
    let most = seen.reusable(size(evidence));
    most > 0 && seen.usage[1].cached_tokens.is_some_and(|cached| cached >= most)
}

pub fn prefix_caching_on(evidence: &Evidence<'_>) -> Verdict {
    let remedy = evidence.family.caching_on;
    if evidence.told.prefix_caching == Some(false) {
        return Verdict::bad("switched off", remedy);
    }
    let told = evidence.told.prefix_caching == Some(true);
    match probed(evidence).map(|seen| (seen, reused(evidence, seen))) {
        Ok((_, (found, Some(true)))) => Verdict::good(format!("on: the second of two equal requests {found}")),
        Ok((_, (found, Some(false)))) if told => Verdict::bad(
            format!("switched on, but the second of two equal requests {found}"),
            "if the model has other attention than full (vllm-project/vllm#43587), set model.hybrid: true and route by load; else give the engine more KV memory",
        ),
        Ok((_, (found, Some(false)))) => Verdict::bad(format!("the second of two equal requests {found}"), remedy),
        Ok((seen, _)) if !told && seen.first.blocks > 0 => Verdict::good("on: blocks were stored"),
        _ if told => Verdict::good("on"),
        Ok(_) => Verdict::unknown("not told").remedy(remedy),
        Err(untold) => untold.remedy(remedy),
    }
}

pub fn block_size(evidence: &Evidence<'_>) -> Verdict {
    let told = size(evidence);
    if let Some(other) = evidence.found.ranks.iter().find(|rank| rank.block_size != told) {
        return Verdict::bad(
            format!(
                "rank {} has blocks of {} tokens, rank {} of {told}",
                other.rank, other.block_size, evidence.found.ranks[0].rank
            ),
            "start all ranks with one block size",
        );
    }
    let shown = match &evidence.probe {
        Probe::Done(seen) => seen.first.block_sizes.iter().copied().collect::<Vec<_>>(),
        _ => Vec::new(),
    };
    match (told, shown.as_slice()) {
        (0, []) => Verdict::unknown("not told").remedy(evidence.family.block_size),
        (0, sizes) => Verdict::unknown(format!("not told; events have blocks of {sizes:?} tokens"))
            .remedy(evidence.family.block_size),
        (told, [_, ..]) if !shown.contains(&told) => {
            let remedy = format!("set model.block_size: {} in sidecar.yaml", shown[0]);
            Verdict::bad(format!("{told} tokens by its pages, {shown:?} by its events"), remedy)
        }
        (told, _) if told < evidence.config.blocks.tokens_min => {
            let least = evidence.config.blocks.tokens_min;
            Verdict::good(format!("{told} tokens; published by {least} and more (blocks.tokens_min)"))
        }
        (told, _) if told > 256 => Verdict::good(format!("{told} tokens: a shorter prompt is never reused")),
        (told, _) => Verdict::good(format!("{told} tokens")),
    }
}

pub fn hash_options(evidence: &Evidence<'_>) -> Verdict {
    match (&evidence.told.hashes, evidence.found.facts.kind) {
        (Some(found), _) => Verdict::good(found.as_str()),
        (None, EngineKind::TrtLlm) => Verdict::good(evidence.family.hashes),
        (None, _) => Verdict::unknown(evidence.family.hashes),
    }
}

pub fn usage_details(evidence: &Evidence<'_>) -> Verdict {
    let remedy = evidence.family.usage_on;
    let seen = match probed(evidence) {
        Ok(seen) => seen,
        Err(untold) => {
            return match evidence.told.usage {
                Some(true) => Verdict::good("cached_tokens are switched on"),
                Some(false) => {
                    Verdict::bad("answers do not tell cached_tokens: predictions are checked by events alone", remedy)
                }
                None => untold.remedy(remedy),
            };
        }
    };
    match (seen.usage[1].cached_tokens, evidence.told.usage, evidence.found.facts.kind) {
        (Some(_), ..) => Verdict::good("answers tell cached_tokens"),
        (None, Some(true), _) => {
            Verdict::unknown("switched on, but two equal requests told no cached_tokens: was nothing reused?")
        }
        (None, _, EngineKind::TrtLlm) => {
            Verdict::unknown("answers do not tell cached_tokens: predictions are checked by events alone")
                .remedy(remedy)
        }
        (None, ..) => {
            Verdict::bad("answers do not tell cached_tokens: predictions are checked by events alone", remedy)
        }
    }
}

pub fn identity_honoured(evidence: &Evidence<'_>) -> Verdict {
    let seen = match pictured(evidence) {
        Ok(seen) => seen,
        Err(verdict) => return verdict,
    };
    let (found, again) = reused(evidence, seen);
    if again == Some(false) {
        return Verdict::bad(format!("the same picture and text once more {found}"), "see prefix_caching_on");
    }
    if !seen.listened || seen.first.blocks == 0 {
        return Verdict::unknown(format!("no event of the probe was seen: see events_reachable; {found}"));
    }
    let first = &seen.first;
    if let Some(uuid) = &seen.uuid {
        return if first.media.contains(uuid) {
            Verdict::good(format!("events carry the uuid that was sent; {found}"))
        } else if let Some(other) = first.media.first() {
            Verdict::bad(
                format!("events name the picture {}, not the uuid that was sent", shown(other)),
                "start vllm serve without --media-io-kwargs for images, which turns every uuid into a hash, and not older than parts with uuid",
            )
        } else {
            Verdict::bad(
                "blocks with the picture came without a media key",
                "take a newer vLLM, whose events have extra_keys",
            )
        };
    }
    let Some(again) = &seen.again else { return Verdict::unknown(format!("the picture was sent once only; {found}")) };
    let (marks, others, what) = match evidence.found.facts.kind {
        EngineKind::TrtLlm => (first.media.len(), first.media.intersection(&again.media).count(), "mm_keys"),
        _ => (first.pads.len(), first.pads.intersection(&again.pads).count(), "pads"),
    };
    match (marks, others) {
        (0, _) => Verdict::unknown(format!("events show no {what} of the picture; {found}")),
        (_, 0) => Verdict::bad(format!("the same picture after another text had other {what}"), "see media_repeatable"),
        _ => Verdict::good(format!("the same picture after another text had the same {what}; {found}")),
    }
}

pub fn media_repeatable(evidence: &Evidence<'_>) -> Verdict {
    let seen = match pictured(evidence) {
        Ok(seen) => seen,
        Err(_) if matches!(&evidence.probe, Probe::Done(_)) => {
            return Verdict::unknown("no picture was taken: see identity_honoured");
        }
        Err(verdict) => return verdict,
    };
    let kind = evidence.found.facts.kind;
    let honoured = identity_honoured(evidence);
    if honoured.ok == Some(true) || reused_whole(evidence, seen) {
        return Verdict::good("equal pictures have one identity");
    }
    let both =
        |marks: fn(&crate::doctor::listen::Marks) -> bool| marks(&seen.first) && seen.again.as_ref().is_some_and(marks);
    match kind {
        EngineKind::Sglang if both(|marks| !marks.pads.is_empty()) && honoured.ok == Some(false) => Verdict::bad(
            "each request gives the same picture other pads, so no picture is ever reused",
            "start sglang without SGLANG_MM_SKIP_COMPUTE_HASH=1",
        ),
        EngineKind::TrtLlm if both(|marks| !marks.media.is_empty()) && honoured.ok == Some(false) => Verdict::bad(
            "each request gives the same picture another key, so no picture is ever reused",
            "no option is known; route this model by load",
        ),
        _ => Verdict::unknown(format!("cannot be told: {}", honoured.found)),
    }
}
