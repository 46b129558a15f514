use crate::cut::CutPolicy;
use crate::edit::Edits;
use crate::scan;

#[track_caller]
fn check(body: &str, policy: CutPolicy, expect: &str) {
    let edits = Edits::new(scan(body, policy, true).unwrap().cuts, []).unwrap();
    let cut = String::from_utf8(edits.apply(body.as_bytes())).unwrap();
    assert_eq!(cut, expect);
    serde_json::from_str::<serde_json::Value>(&cut).unwrap();
}

#[track_caller]
fn check_all(body: &str, expect: &str) {
    check(body, CutPolicy::default(), expect);
}

#[test]
fn the_report_mode_goes_and_other_arguments_stay() {
    let rest = r#""prompt":"x""#;
    check_all(
        &format!(r#"{{{rest},"vllm_xargs":{{"kv_cache_report_mode":"full"}}}}"#),
        &format!(r#"{{{rest},"vllm_xargs":{{}}}}"#),
    );
    check_all(
        &format!(r#"{{"vllm_xargs":{{"a":1,"kv_cache_report_mode":"full","b":2}},{rest}}}"#),
        &format!(r#"{{"vllm_xargs":{{"a":1,"b":2}},{rest}}}"#),
    );
    check_all(
        &format!(r#"{{{rest},"vllm_xargs":{{"kv\u005fcache_report_mode":1,"b":2}}}}"#),
        &format!(r#"{{{rest},"vllm_xargs":{{"b":2}}}}"#),
    );
    check_all(&format!(r#"{{{rest},"vllm_xargs":null}}"#), &format!(r#"{{{rest},"vllm_xargs":null}}"#));
}

#[test]
fn neighbouring_transfer_params_go_in_one_cut() {
    check_all(r#"{"kv_transfer_params":{"a":1},"ec_transfer_params":{},"prompt":"x"}"#, r#"{"prompt":"x"}"#);
    check_all(r#"{"prompt":"x","kv_transfer_params":{"a":1},"ec_transfer_params":{}}"#, r#"{"prompt":"x"}"#);
    check_all(r#"{"kv_transfer_params":1,"prompt":"x","ec_transfer_params":2,"n":1}"#, r#"{"prompt":"x","n":1}"#);
}

#[test]
fn uuids_go_by_policy() {
    let body = r#"{"messages":[{"role":"user","content":[{"uuid":"k","image_url":"u"},{"type":"text","text":"t","uuid":"stays"}]}]}"#;
    let cut =
        r#"{"messages":[{"role":"user","content":[{"image_url":"u"},{"type":"text","text":"t","uuid":"stays"}]}]}"#;
    check_all(body, cut);
    check(body, CutPolicy { uuids: false, ..CutPolicy::default() }, body);
}

#[test]
fn keys_given_twice_are_refused() {
    let twice = r#"{"prompt":"x","vllm_xargs":{"kv_cache_report_mode":1,"kv_cache_report_mode":2}}"#;
    let error = scan(twice, CutPolicy::default(), true).unwrap_err();
    assert_eq!(error.field, "vllm_xargs.kv_cache_report_mode");
    scan(r#"{"messages":[],"messages":[]}"#, CutPolicy::default(), true).unwrap_err();
}
