//! What an engine put in place of an image: its prompt laid over ours.

use std::ops::Range;

use crate::prepare::Rendering;

/// Why a prompt shows nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Misfit {
    /// The prompts differ in more than one place, or where no image is.
    Disagrees,
    /// Several placeholders could have been replaced.
    Ambiguous,
    TooLong,
}

/// Positions that an engine keys by the image, in tokens from the start of its prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Keyed {
    pub start: usize,
    pub len: usize,
}

/// A prompt with one image, before expansion.
#[derive(Clone, Debug)]
pub struct Own {
    pub tokens: Vec<u32>,
    /// What the template writes for the image.
    pub written: Range<usize>,
    /// That of the model's config.
    pub image_token: Option<u32>,
}

impl Own {
    /// `without` = the same prompt without the image. `None` when the template writes nothing for it, or changes other tokens too.
    pub fn new(tokens: Vec<u32>, without: &[u32], image_token: Option<u32>) -> Option<Self> {
        let more = tokens.len().checked_sub(without.len()).filter(|more| *more > 0)?;
        let front = tokens.iter().zip(without).take_while(|(a, b)| a == b).count();
        let tail = tokens.iter().rev().zip(without.iter().rev()).take_while(|(a, b)| a == b).count();
        // Equal tokens at the seams leave it open where it begins.
        let first = without.len() - tail;
        (first <= front).then(|| Self { tokens, written: first..front + more, image_token })
    }
}

/// What becomes of one image, from our prompt and as the engine expanded it (`engine`).
///
/// With the keyed range that is exact. Without, one token was replaced and all that stands in its place is taken as keyed: the config's
/// image token where the prompt has it once and it fits, else the one token in which the prompts differ, else the one that was repeated.
///
/// # Errors
/// When nothing, or more than one thing, could have been replaced.
pub fn align(own: &Own, engine: &[u32], keyed: Option<Keyed>) -> Result<Rendering, Misfit> {
    match keyed {
        Some(keyed) => by_range(own, engine, keyed),
        None if own.tokens == engine => Err(Misfit::Disagrees),
        None => by_token(own, engine).unwrap_or_else(|| by_difference(own, engine)),
    }
}

/// Our tokens from `start` on that `engine` has replaced by those in its range; all others must be equal.
fn by_range(own: &Own, engine: &[u32], Keyed { start, len }: Keyed) -> Result<Rendering, Misfit> {
    let Own { tokens: own, written, .. } = own;
    let end = start.checked_add(len).filter(|end| len > 0 && *end <= engine.len()).ok_or(Misfit::Disagrees)?;
    let tail = engine.len() - end;
    let own_end = own.len().checked_sub(tail).filter(|end| *end >= start).ok_or(Misfit::Disagrees)?;
    if own[..start] != engine[..start] || own[own_end..] != engine[end..] {
        return Err(Misfit::Disagrees);
    }
    let placeholder = &own[start..own_end];
    if placeholder.is_empty() {
        return Err(Misfit::Ambiguous);
    }
    if start < written.start || own_end > written.end {
        return Err(Misfit::Disagrees);
    }
    // Engines replace the first that they find.
    if own.windows(placeholder.len()).position(|window| window == placeholder) != Some(start) {
        return Err(Misfit::Ambiguous);
    }
    Rendering::new(placeholder, &engine[start..end]).ok_or(Misfit::TooLong)
}

/// By the config's image token. `None` = it is not what was replaced.
fn by_token(own: &Own, engine: &[u32]) -> Option<Result<Rendering, Misfit>> {
    let tokens = own.tokens.iter().enumerate();
    let mut places = tokens.filter(|(_, token)| Some(**token) == own.image_token).map(|(at, _)| at);
    let (start, None) = (places.next()?, places.next()) else { return None };
    let len = (engine.len() + 1).checked_sub(own.tokens.len()).filter(|len| *len > 0)?;
    match by_range(own, engine, Keyed { start, len }) {
        Err(Misfit::Disagrees) => None,
        found => Some(found),
    }
}

fn by_difference(prompt: &Own, engine: &[u32]) -> Result<Rendering, Misfit> {
    let own = &prompt.tokens[..];
    let shorter = own.len().min(engine.len());
    let equal = |(a, b): &(&u32, &u32)| a == b;
    let front = own.iter().zip(engine).take_while(equal).count();
    let tail = own.iter().rev().zip(engine.iter().rev()).take(shorter - front).take_while(equal).count();
    let (replaced, expansion) = (&own[front..own.len() - tail], &engine[front..engine.len() - tail]);
    match (replaced, expansion) {
        ([_], [_, ..]) => by_range(prompt, engine, Keyed { start: front, len: expansion.len() }),
        // Only more of the token before: which of its kind came first does not show, and does not matter.
        ([], [first, rest @ ..])
            if rest.iter().all(|token| token == first) && front > 0 && own[front - 1] == *first =>
        {
            by_range(prompt, engine, Keyed { start: front - 1, len: expansion.len() + 1 })
        }
        ([], [_, ..]) => Err(Misfit::Ambiguous),
        _ => Err(Misfit::Disagrees),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAD: u32 = 9;

    /// The whole prompt was written for the image. `expect`: "placeholder → expansion", or the misfit.
    #[track_caller]
    fn check(own: &[u32], engine: &[u32], range: Option<(usize, usize)>, expect: &str) {
        check_in(own, 0..own.len(), engine, range, expect);
    }

    #[track_caller]
    fn check_in(own: &[u32], written: Range<usize>, engine: &[u32], range: Option<(usize, usize)>, expect: &str) {
        let own = Own { tokens: own.to_vec(), written, image_token: Some(PAD) };
        let keyed = range.map(|(start, len)| Keyed { start, len });
        let got = match align(&own, engine, keyed) {
            Err(misfit) => format!("{misfit:?}"),
            Ok(rendering) => {
                let runs = rendering.expansion().runs().iter().map(|run| format!("{}x{}", run.token, run.count));
                format!("{:?} → {}", rendering.placeholder(), runs.collect::<Vec<_>>().join(" "))
            }
        };
        assert_eq!(got, expect);
    }

    #[test]
    fn the_keyed_range_tells_what_was_replaced() {
        check(&[1, PAD, 2], &[1, PAD, PAD, PAD, 2], Some((1, 3)), "[9] → 9x3");
        // Marks of the expansion that equal their neighbours.
        check(&[5, 6, 7], &[5, 5, 8, 8, 7, 7], Some((1, 4)), "[6] → 5x1 8x2 7x1");
        // Several tokens make one placeholder.
        check(&[1, 5, 6, 5, 2], &[1, 8, 8, 2], Some((1, 2)), "[5, 6, 5] → 8x2");
        // One token for one.
        check(&[1, PAD, 2], &[1, PAD, 2], Some((1, 1)), "[9] → 9x1");
    }

    #[test]
    fn placeholders_may_stand_at_the_edges() {
        check(&[PAD, 2], &[PAD, PAD, 2], Some((0, 2)), "[9] → 9x2");
        check(&[1, PAD], &[1, PAD, PAD], Some((1, 2)), "[9] → 9x2");
        check(&[PAD], &[PAD, PAD], Some((0, 2)), "[9] → 9x2");
        check(&[PAD, 2], &[PAD, PAD, 2], None, "[9] → 9x2");
        check(&[1, PAD], &[1, 8, 8], None, "[9] → 8x2");
        check(&[6], &[8, 8], None, "[6] → 8x2");
    }

    #[test]
    fn without_a_range_the_image_token_tells_then_the_difference() {
        check(&[1, PAD, 2], &[1, PAD, PAD, PAD, 2], None, "[9] → 9x3");
        check(&[5, PAD, 7], &[5, 5, 8, 8, 7, 7], None, "[9] → 5x1 8x2 7x1");
        check(&[1, 6, 2], &[1, 8, 8, 7, 2], None, "[6] → 8x2 7x1");
        // The image token stands in text as well, and something else was replaced.
        check(&[PAD, 6, PAD, 2], &[PAD, 8, 8, PAD, 2], None, "[6] → 8x2");
        check(&[PAD, 6, 2], &[PAD, 8, 8, 2], None, "[6] → 8x2");
        // Repeated, and not named by the config.
        check(&[1, 6, 2], &[1, 6, 6, 6, 2], None, "[6] → 6x3");
    }

    #[test]
    fn seams_that_do_not_show_are_ambiguous() {
        // Rows with breaks after a placeholder that the config does not name: [6] → 6 6 7 6 6 8, or [] → …
        check(&[1, 6, 2], &[1, 6, 6, 7, 6, 6, 8, 2], None, "Ambiguous");
        // Inserted, with nothing replaced.
        check(&[1, 2], &[1, 8, 8, 2], None, "Ambiguous");
        check(&[1, 2], &[1, 8, 8, 2], Some((1, 2)), "Ambiguous");
        check(&[], &[PAD, PAD], Some((0, 2)), "Ambiguous");
        // The engine would replace the first of two.
        check(&[6, 1, 6, 2], &[6, 1, 8, 2], Some((2, 1)), "Ambiguous");
    }

    #[test]
    fn prompts_that_differ_elsewhere_show_nothing() {
        // Another word in front, behind; a system prompt that ours does not write; nothing replaced at all.
        for (own, engine, range) in [
            (&[1, PAD, 2][..], &[3, PAD, PAD, 2][..], (1, 2)),
            (&[1, PAD, 2], &[1, PAD, PAD, 3], (1, 2)),
            (&[1, PAD, 2], &[4, 4, 1, PAD, PAD, 2], (3, 2)),
            (&[1, PAD, 2], &[], (0, 0)),
            (&[1, PAD, 2], &[1, PAD, PAD, 2], (1, 0)),
            (&[1, PAD, 2], &[1, PAD, PAD, 2], (usize::MAX, 2)),
            (&[1, PAD, 2], &[1, PAD, PAD, 2], (1, 9)),
        ] {
            check(own, engine, Some(range), "Disagrees");
        }
        for engine in [&[3, PAD, PAD, 2][..], &[4, 1, PAD, PAD, 2], &[1, PAD, PAD, 3], &[1, PAD, PAD, 2, 2, 3]] {
            check_in(&[1, PAD, 2], 1..2, engine, None, "Disagrees");
        }
        // What was replaced is not what the template writes for an image.
        check_in(&[1, PAD, 6, 2], 1..2, &[1, PAD, 8, 8, 2], Some((2, 2)), "Disagrees");
        // Nothing was expanded.
        check(&[1, PAD, 2], &[1, PAD, 2], None, "Disagrees");
        check(&[], &[], None, "Disagrees");
    }

    #[test]
    fn what_is_written_for_an_image_is_found_by_leaving_it_out() {
        let written = |with: &[u32], without: &[u32]| Own::new(with.to_vec(), without, None).map(|own| own.written);
        assert_eq!(written(&[1, 5, PAD, 6, 2], &[1, 2]), Some(1..4));
        assert_eq!(written(&[PAD], &[]), Some(0..1));
        // Line breaks around it could belong to either side.
        assert_eq!(written(&[1, 4, PAD, 4, 2], &[1, 4, 2]), Some(1..4));
        assert_eq!(written(&[1, PAD, 3], &[1, 2]), None);
        assert_eq!(written(&[1, 2], &[1, 2]), None);
    }

    #[test]
    fn several_replaced_places_show_nothing() {
        let (own, engine) = ([1, PAD, 3, PAD, 2], [1, 8, 8, 3, 8, 8, 2]);
        check(&own, &engine, None, "Disagrees");
        check(&own, &engine, Some((1, 2)), "Disagrees");
    }

    #[test]
    fn what_is_too_much_is_not_kept() {
        let engine: Vec<u32> = (0..10_000).collect();
        check(&[PAD], &engine, Some((0, engine.len())), "TooLong");
        check(&[PAD], &vec![PAD; (1 << 20) + 1], None, "TooLong");
        check(&[PAD], &vec![PAD; 1 << 20], None, "[9] → 9x1048576");
    }
}
