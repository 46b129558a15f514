use crate::completion::{CompletionRequest, Prompt};

#[track_caller]
fn check(prompt: &str, expect: Option<Prompt<'_>>) {
    let body = format!(r#"{{"model":"m","prompt":{prompt}}}"#);
    assert_eq!(CompletionRequest::parse(&body).ok().and_then(|request| request.prompt), expect, "{prompt}");
}

#[test]
fn a_prompt_comes_in_four_forms() {
    check(r#""a\nb""#, Some(Prompt::Text("a\nb".into())));
    check(r#"["a", "b"]"#, Some(Prompt::Texts(vec!["a".into(), "b".into()])));
    check("[1, 2, 4294967295]", Some(Prompt::Tokens(vec![1, 2, u32::MAX])));
    check("[[1], []]", Some(Prompt::TokenLists(vec![vec![1], vec![]])));
}

#[test]
fn other_prompts_are_refused() {
    for prompt in ["[]", "7", "{}", "null", "[1, \"a\"]", "[-1]", "[1.5]", "[4294967296]", "[1e2]", "[[[1]]]", "[true]"]
    {
        check(prompt, None);
    }
}

#[test]
fn embeddings_may_stand_in_for_a_prompt() {
    let request = CompletionRequest::parse(r#"{"prompt_embeds":"UEsD","prompt":null}"#).unwrap();
    assert!(request.prompt_embeds && request.prompt.is_none());
    assert!(!CompletionRequest::parse(r#"{"prompt_embeds":null,"prompt":"x"}"#).unwrap().prompt_embeds);
}
