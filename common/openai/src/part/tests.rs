use serde_json::{Value, json};

use crate::chat::ChatRequest;
use crate::edit::Edits;
use crate::part::MediaKind;

fn body(part: &str) -> String {
    format!(r#"{{"messages":[{{"role":"user","content":[{part}]}}]}}"#)
}

/// What the template gets, and kind and URL of the media item.
#[track_caller]
fn check(part: &str, marker: Value, media: Option<(MediaKind, Option<&str>)>) {
    let body = body(part);
    let request = ChatRequest::parse(&body).unwrap();
    assert_eq!(request.messages[0]["content"][0], marker, "{part}");
    let found: Vec<_> = request.media.iter().map(|part| (part.kind, part.url.as_deref())).collect();
    assert_eq!(found, media.into_iter().collect::<Vec<_>>(), "{part}");
}

#[track_caller]
fn check_refused(part: &str, problem: &str) {
    let error = ChatRequest::parse(&body(part)).unwrap_err();
    assert!(error.to_string().contains(problem), "{part}: {error}");
    assert!(error.field.starts_with("messages[0].content[0]"), "{}", error.field);
}

#[test]
fn text_parts_stay_as_they_are() {
    check(r#"{"text":"hi","type":"text","x":1}"#, json!({"type":"text","text":"hi","x":1}), None);
    check(r#""hi""#, json!("hi"), None);
    check(
        r#"{"type":"thinking","thinking":"t","closed":true}"#,
        json!({"type":"thinking","thinking":"t","closed":true}),
        None,
    );
    check(r#"{"type":"video_clip","x":1}"#, json!({"type":"video_clip","x":1}), None);
}

#[test]
fn each_kind_of_media_becomes_a_marker() {
    use MediaKind::*;
    let image = json!({"type":"image"});
    check(r#"{"type":"image_url","image_url":{"url":"u","detail":"low"}}"#, image.clone(), Some((Image, Some("u"))));
    check(r#"{"type":"image_url","image_url":"u"}"#, image.clone(), Some((Image, Some("u"))));
    check(r#"{"image_url":"u"}"#, image.clone(), Some((Image, Some("u"))));
    check(r#"{"type":null,"image_url":"u"}"#, image.clone(), Some((Image, Some("u"))));
    check(r#"{"type":"image_url","image_url":null,"uuid":"k"}"#, image.clone(), Some((Image, None)));
    check(r#"{"type":"input_image","image_url":"u"}"#, image.clone(), Some((Image, Some("u"))));
    check(r#"{"type":"image","image":"u"}"#, image.clone(), Some((Image, Some("u"))));
    check(
        r#"{"type":"image_embeds","image_embeds":{"image_embeds":"k05V","image_grid_thw":[1,4,6]}}"#,
        image,
        Some((Embedding, None)),
    );
    check(r#"{"type":"video_url","video_url":{"url":"v"}}"#, json!({"type":"video"}), Some((Video, Some("v"))));
    check(r#"{"type":"audio_url","audio_url":{"url":"a"}}"#, json!({"type":"audio"}), Some((Audio, Some("a"))));
    check(
        r#"{"type":"input_audio","input_audio":{"data":"QUJD","format":"wav"}}"#,
        json!({"type":"audio"}),
        Some((Audio, Some("QUJD"))),
    );
    check(
        r#"{"type":"prompt_embeds","data":"QUJD"}"#,
        json!({"type":"text","text":"<prompt_embeds>"}),
        Some((PromptEmbedding, None)),
    );
}

#[test]
fn fields_that_engines_do_not_know_go_with_the_marker() {
    check(
        r#"{"name":"n","image_url":{"url":"u"},"type":"image_url","uuid":"k","min_pixels":4}"#,
        json!({"type":"image","min_pixels":4}),
        Some((MediaKind::Image, Some("u"))),
    );
}

#[test]
fn parts_that_a_uuid_would_turn_into_something_else_are_refused() {
    check_refused(r#"{"type":"text","text":"t","image_url":"u","uuid":"k"}"#, "text part with an `image_url`");
    check_refused(r#"{"type":"video_url","image_url":"u"}"#, "another `type`");
    check_refused(r#"{"type":"image_url","uuid":"k"}"#, "without its `image_url`");
    check_refused(r#"{"image_url":"u","video_url":"v"}"#, "second media item");
    check_refused(r#"{"uuid":"k"}"#, "without a `type`");
    check_refused("7", "not a content part");
    check_refused(r#"{"type":"image_url","image_url":"u","uuid":7}"#, "not a string");
    check_refused(r#"{"type":"image_url","image_url":"u","uuid":"a","\u0075uid":"b"}"#, "given twice");
    check_refused(r#"{"type":"image_url","image_url":{"url":"u","url":"w"}}"#, "given twice");
}

#[test]
fn urls_are_borrowed_unless_they_have_escapes() {
    let body = body(r#"{"image_url":"data:image/png;base64,AA/B"},{"image_url":"data:image\/png;base64,AA\/B"}"#);
    let request = ChatRequest::parse(&body).unwrap();
    assert!(matches!(request.media[0].url, Some(std::borrow::Cow::Borrowed("data:image/png;base64,AA/B"))));
    assert!(matches!(request.media[1].url.as_deref(), Some("data:image/png;base64,AA/B")));
}

/// Cuts the uuid out and puts another in, as the sidecar does.
#[track_caller]
fn check_uuid(part: &str, uuid: Option<&str>, without: &str) {
    let body = body(part);
    let request = ChatRequest::parse(&body).unwrap();
    let media = &request.media[0];
    assert_eq!(media.uuid.as_deref(), uuid);
    let removed = Edits::new(media.uuid_cut.clone(), []).unwrap().apply(body.as_bytes());
    assert_eq!(String::from_utf8(removed).unwrap(), self::body(without));
    let insert = (media.insert_at, br#""uuid":"ours","#.to_vec());
    let replaced = Edits::new(media.uuid_cut.clone(), [insert]).unwrap().apply(body.as_bytes());
    let replaced = String::from_utf8(replaced).unwrap();
    assert_eq!(ChatRequest::parse(&replaced).unwrap().media[0].uuid.as_deref(), Some("ours"), "{replaced}");
}

#[test]
fn a_uuid_is_cut_wherever_it_stands() {
    check_uuid(r#"{"uuid":"k","image_url":"u"}"#, Some("k"), r#"{"image_url":"u"}"#);
    check_uuid(r#"{ "uuid" : "k" , "image_url":"u" }"#, Some("k"), r#"{ "image_url":"u" }"#);
    check_uuid(r#"{"image_url":"u","uuid":"k"}"#, Some("k"), r#"{"image_url":"u"}"#);
    check_uuid(
        r#"{"image_url":"u" , "uuid":"k" , "type":"image_url"}"#,
        Some("k"),
        r#"{"image_url":"u" , "type":"image_url"}"#,
    );
    check_uuid(r#"{"image_url":"u","\u0075\u0075id":"k"}"#, Some("k"), r#"{"image_url":"u"}"#);
    check_uuid(r#"{"image_url":"u","uuid":null}"#, None, r#"{"image_url":"u"}"#);
    check_uuid(r#"{"image_url":"u"}"#, None, r#"{"image_url":"u"}"#);
    let inside = r#"{"image_url":{"url":"u","uuid":"inner"}}"#;
    check_uuid(inside, None, inside);
}

#[test]
fn a_url_is_known_with_its_place() {
    for part in [r#"{"image_url":{"detail":"low","url": "a\u002fb" }}"#, r#"{"type":"image_url","image_url":"a/b"}"#] {
        let body = format!(r#"{{"messages":[{{"role":"user","content":[{part}]}}]}}"#);
        let request = ChatRequest::parse(&body).unwrap();
        let text = &body[request.media[0].url_at.clone().unwrap()];
        assert_eq!(serde_json::from_str::<String>(text).unwrap(), "a/b");
    }
}

#[test]
fn options_of_a_media_object_are_kept_unless_they_say_nothing() {
    let options = |media: &str| {
        let body = body(&format!(r#"{{"type":"image_url","image_url":{{"url":"u",{media}}}}}"#));
        let request = ChatRequest::parse(&body).unwrap();
        Value::Object(request.media[0].options.clone())
    };
    assert_eq!(options(r#""detail":"low","x":1"#), json!({"detail":"low"}));
    assert_eq!(options(r#""detail":"auto","max_dynamic_patch":null"#), json!({}));
    assert_eq!(
        options(r#""min_dynamic_patch":1,"max_dynamic_patch":4"#),
        json!({"min_dynamic_patch":1,"max_dynamic_patch":4})
    );
}
