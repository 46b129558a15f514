//! A renderer's answer: the expanded prompt, and where the image stands in it.

use std::collections::BTreeMap;

use serde::Deserialize;

use super::align::{Keyed, Misfit, Own, align};
use super::metrics::AskEnd;
use super::standing::Page;
use crate::prepare::Rendering;

/// `/v1/chat/completions/render`.
#[derive(Deserialize)]
struct Rendered {
    token_ids: Vec<u32>,
    #[serde(default)]
    features: Option<Features>,
}

#[derive(Deserialize)]
struct Features {
    /// By kind of media.
    #[serde(default)]
    mm_placeholders: Option<BTreeMap<String, Vec<Place>>>,
}

#[derive(Debug, PartialEq, Eq, Deserialize)]
struct Place {
    offset: usize,
    length: usize,
}

/// `/tokenize`.
#[derive(Deserialize)]
struct Tokenized {
    tokens: Vec<u32>,
}

/// Tokens of an answer, and where images stand in them as far as the page tells that.
fn parse(page: Page, body: &[u8]) -> Result<(Vec<u32>, Option<Vec<Place>>), AskEnd> {
    let malformed = |error: serde_json::Error| {
        tracing::debug!(%error, "answer of a renderer cannot be read");
        AskEnd::Malformed
    };
    match page {
        Page::Tokenize => Ok((serde_json::from_slice::<Tokenized>(body).map_err(malformed)?.tokens, None)),
        Page::Render => {
            let rendered: Rendered = serde_json::from_slice(body).map_err(malformed)?;
            let places = rendered.features.and_then(|features| features.mm_placeholders).unwrap_or_default();
            Ok((rendered.token_ids, Some(places.into_values().flatten().collect())))
        }
    }
}

/// What the answer to a probe with one image shows. CPU work.
pub fn read(page: Page, body: &[u8], own: &Own) -> Result<Rendering, AskEnd> {
    let (tokens, places) = parse(page, body)?;
    let keyed = match places.as_deref() {
        None => None,
        Some([Place { offset, length }]) => Some(Keyed { start: *offset, len: *length }),
        // An image that the engine takes apart, or does not see.
        Some(_) => return Err(AskEnd::Disagrees),
    };
    align(own, &tokens, keyed).map_err(|misfit| match misfit {
        Misfit::Disagrees => AskEnd::Disagrees,
        Misfit::Ambiguous => AskEnd::Ambiguous,
        Misfit::TooLong => AskEnd::TooLong,
    })
}

/// The answer to the probe with its image twice is what `shown` of one image predicts: an image becomes the same in every place.
/// `own` = our tokens of that chat. CPU work.
pub fn repeats(page: Page, body: &[u8], own: &[u32], shown: &Rendering) -> Result<bool, AskEnd> {
    let (tokens, places) = parse(page, body)?;
    let (mut expect, mut expect_places, mut rest) = (Vec::with_capacity(tokens.len()), Vec::new(), own);
    while let Some((token, after)) = rest.split_first() {
        match rest.strip_prefix(shown.placeholder()).filter(|_| expect_places.len() < 2) {
            Some(after) => {
                expect_places.push(Place { offset: expect.len(), length: shown.expansion().len() as usize });
                for run in shown.expansion().runs() {
                    expect.extend(std::iter::repeat_n(run.token, run.count as usize));
                }
                rest = after;
            }
            None => {
                expect.push(*token);
                rest = after;
            }
        }
    }
    let places_fit = places.is_none_or(|mut places| {
        places.sort_by_key(|place| place.offset);
        places == expect_places
    });
    Ok(expect_places.len() == 2 && tokens == expect && places_fit)
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use serde_json::{Value, json};

    use super::*;
    use crate::prepare::{ClientUuid, Preparer};

    const MODEL: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/vectors/vllm/tiny-qwen3-vl");

    /// Every chat with one image in the capture of a vLLM shows what the image became, whichever page tells it.
    #[test]
    fn captured_renderings_are_read() {
        let capture = include_str!("../../../tests/vectors/vllm/image_single.jsonl");
        let preparer = Preparer::load(Path::new(MODEL), ClientUuid::Replace).unwrap();
        let mut compared = 0;
        for line in capture.lines() {
            let record: Value = serde_json::from_str(line).unwrap();
            let rendered = &record["render"];
            let Some([place]) = rendered["mm_placeholders"]["image"].as_array().map(Vec::as_slice) else { continue };
            let Some((tokens, image_token)) = preparer.unexpanded(&record["request"].to_string()) else { continue };
            let own = Own { written: 0..tokens.len(), tokens, image_token };
            let features = json!({"mm_hashes": {}, "mm_placeholders": rendered["mm_placeholders"]});
            let pages = [
                (Page::Render, json!({"token_ids": rendered["token_ids"], "features": features, "priority": 0})),
                (Page::Tokenize, json!({"count": 1, "tokens": rendered["token_ids"], "token_strs": null})),
            ];
            for (page, answer) in pages {
                let shown = read(page, answer.to_string().as_bytes(), &own);
                let shown = shown.unwrap_or_else(|end| panic!("{} {page:?}: {end:?}", record["name"]));
                let runs: Vec<_> = shown.expansion().runs().iter().map(|run| (run.token, run.count)).collect();
                let length = u32::try_from(place["length"].as_u64().unwrap()).unwrap();
                assert_eq!((shown.placeholder(), &runs[..]), (&[593][..], &[(593, length)][..]), "{}", record["name"]);
            }
            compared += 1;
        }
        assert!(compared >= 5, "{compared} chats");
    }

    #[test]
    fn other_answers_show_nothing() {
        let own = Own { tokens: vec![1, 9, 2], written: 1..2, image_token: Some(9) };
        let place = |offset: u64, length: u64| json!({"offset": offset, "length": length});
        let rendered = |places: Value| json!({"token_ids": [1, 9, 9, 2], "features": {"mm_placeholders": places}});
        for (page, answer, expect) in [
            (Page::Render, json!({"token_ids": [1, 9, 2]}), AskEnd::Disagrees),
            (Page::Render, rendered(json!({"image": [place(1, 1), place(2, 1)]})), AskEnd::Disagrees),
            (Page::Render, rendered(Value::Null), AskEnd::Disagrees),
            (Page::Render, rendered(json!({"image": [place(u64::MAX, 2)]})), AskEnd::Disagrees),
            (Page::Render, json!({"token_ids": [-1]}), AskEnd::Malformed),
            (Page::Render, json!([]), AskEnd::Malformed),
            (Page::Tokenize, json!({"tokens": "1"}), AskEnd::Malformed),
            (Page::Tokenize, json!({"tokens": [1, 9, 2]}), AskEnd::Disagrees),
        ] {
            assert_eq!(read(page, answer.to_string().as_bytes(), &own), Err(expect), "{answer}");
        }
        assert_eq!(read(Page::Render, b"\xff", &own), Err(AskEnd::Malformed));
        let places = json!({"vision_chunk": [place(1, 2)]});
        assert!(read(Page::Render, rendered(places).to_string().as_bytes(), &own).is_ok());
    }
    #[test]
    fn a_second_image_is_the_same_or_not() {
        let (own, shown) = ([1, 9, 3, 9, 2], Rendering::new(&[9], &[7, 8, 8]).unwrap());
        let check = |page: Page, answer: Value, expect: bool| {
            assert_eq!(repeats(page, answer.to_string().as_bytes(), &own, &shown), Ok(expect), "{answer}");
        };
        let rendered = |tokens: &[u32], places: &[(u64, u64)]| {
            let places: Vec<_> =
                places.iter().map(|(offset, length)| json!({"offset": offset, "length": length})).collect();
            json!({"token_ids": tokens, "features": {"mm_placeholders": {"image": places}}})
        };
        let (same, numbered) = ([1, 7, 8, 8, 3, 7, 8, 8, 2], [1, 7, 8, 8, 3, 6, 8, 8, 2]);
        check(Page::Tokenize, json!({"tokens": same}), true);
        check(Page::Tokenize, json!({"tokens": numbered}), false);
        check(Page::Tokenize, json!({"tokens": [1, 7, 8, 8, 3, 9, 2]}), false);
        check(Page::Render, rendered(&same, &[(1, 3), (5, 3)]), true);
        check(Page::Render, rendered(&same, &[(5, 3), (1, 3)]), true);
        check(Page::Render, rendered(&same, &[(1, 3)]), false);
        check(Page::Render, rendered(&same, &[(1, 3), (6, 2)]), false);
        check(Page::Render, rendered(&numbered, &[(1, 3), (5, 3)]), false);
        // A placeholder with a number is there once.
        let own = [1, 9, 3, 10, 2];
        let answer = rendered(&same, &[(1, 3), (5, 3)]).to_string();
        assert_eq!(repeats(Page::Render, answer.as_bytes(), &own, &shown), Ok(false));
        assert_eq!(repeats(Page::Render, b"{", &own, &shown), Err(AskEnd::Malformed));
    }
}
