use std::path::Path;

use super::*;

const A: &str = "sk-aaaaaaaaaaaaaaaa";
const B: &str = "sk-bbbbbbbbbbbbbbbb";
const C: &str = "sk-cccccccccccccccc";

fn config(tenants: &str) -> BalancerConfig {
    fovea_service::config::parse(&format!("tenants: [{tenants}]"), "balancer.yaml").unwrap()
}

fn headers(name: &'static str, value: &str) -> HeaderMap {
    HeaderMap::from_iter([(http::HeaderName::from_static(name), value.parse().unwrap())])
}

fn found(tenants: &Tenants, name: &'static str, value: &str) -> Result<String, Refused> {
    tenants.find(&headers(name, value)).map(|caller| caller.tenant.name.clone())
}

fn file(dir: &Path, name: &str, text: &str) -> String {
    let path = dir.join(name);
    std::fs::write(&path, text).unwrap();
    path.display().to_string()
}

#[test]
fn keys_of_files_and_digests_are_found_in_three_headers() {
    let dir = tempfile::tempdir().unwrap();
    let keys = file(dir.path(), "a", &format!("# team a\n{A} # alice\n\n  {B}\n"));
    let hex: String = keys::digest(C.as_bytes()).0.iter().map(|byte| format!("{byte:02x}")).collect();
    let tenants =
        Tenants::load(&config(&format!("{{name: a, keys_file: {keys}}}, {{name: c, keys_sha256: [{hex}]}}"))).unwrap();
    assert!(!tenants.are_open());
    let find = |name, value: &str| found(&tenants, name, value);
    assert_eq!(find("authorization", &format!("Bearer {A}")), Ok("a".to_owned()));
    assert_eq!(find("authorization", &format!("bearer  {B} ")), Ok("a".to_owned()));
    assert_eq!((find("api-key", C), find("x-api-key", C)), (Ok("c".to_owned()), Ok("c".to_owned())));
    for (name, value) in [("authorization", A), ("authorization", "Bearer "), ("x-other", A), ("api-key", "")] {
        assert_eq!(find(name, value), Err(Refused::NoKey), "{name}: {value}");
    }
    for value in ["alice", "#", "é", &hex, &A[..18]] {
        assert_eq!(find("api-key", value), Err(Refused::UnknownKey), "{value}");
    }
}

#[test]
fn without_tenants_everybody_may_ask() {
    let tenants = Tenants::load(&BalancerConfig::default()).unwrap();
    assert!(tenants.are_open());
    assert_eq!(tenants.find(&HeaderMap::new()).unwrap().tenant.name, DEFAULT);
}

#[test]
fn keys_that_cannot_work_are_named_without_being_shown() {
    let dir = tempfile::tempdir().unwrap();
    let (short, none) = (file(dir.path(), "short", "secret"), file(dir.path(), "none", "# none\n"));
    let one = file(dir.path(), "one", A);
    let error = |tenants: &str| Tenants::load(&config(tenants)).unwrap_err().to_string();
    let said = error(&format!("{{name: a, keys_file: {short}}}"));
    assert!(said.contains("key 1 of") && !said.contains("secret"), "{said}");
    assert!(error(&format!("{{name: a, keys_file: {none}}}")).contains("holds no key"));
    assert!(error("{name: a, keys_file: /nowhere}").contains("cannot read /nowhere"));
    assert!(error("{name: a, keys_env: FOVEA_TEST_NOT_SET}").contains("FOVEA_TEST_NOT_SET is not set"));
    let said = error(&format!("{{name: a, keys_file: {one}}}, {{name: b, keys_file: {one}}}"));
    assert!(said.contains("`a` and `b` have the same key"), "{said}");
}

#[test]
fn changed_files_are_read_again_and_what_was_used_stays_used() {
    let dir = tempfile::tempdir().unwrap();
    let keys = file(dir.path(), "k", A);
    let limits = "per_key: {requests_per_minute: 1, requests_burst: 1}";
    let tenants = Tenants::load(&config(&format!("{{name: a, keys_file: {keys}, {limits}}}"))).unwrap();
    let (now, caller) = (Instant::now(), |key| tenants.find(&headers("api-key", key)));
    drop(caller(A).unwrap().enter(now).unwrap());
    assert!(caller(A).unwrap().enter(now).is_err());
    assert!(!tenants.reload().unwrap());
    file(dir.path(), "k", &format!("{B}\n{A}\n"));
    assert!(tenants.reload().unwrap());
    assert!(caller(A).unwrap().enter(now).is_err(), "its minute began anew");
    assert!(caller(B).unwrap().enter(now).is_ok());
    file(dir.path(), "k", "bad");
    assert!(tenants.reload().is_err());
    assert!(caller(A).is_ok(), "the keys of before are gone");
    file(dir.path(), "k", B);
    assert!(tenants.reload().unwrap());
    assert_eq!(caller(A).unwrap_err(), Refused::UnknownKey);
}

#[test]
fn a_request_that_is_dropped_gives_back_what_no_engine_took() {
    let dir = tempfile::tempdir().unwrap();
    let keys = file(dir.path(), "k", A);
    let limits = "limits: {prompt_tokens_per_minute: 100, concurrent: 1}, per_key: {prompt_tokens_per_minute: 60}";
    let tenants = Tenants::load(&config(&format!("{{name: a, keys_file: {keys}, {limits}}}"))).unwrap();
    let (now, caller) = (Instant::now(), tenants.find(&headers("api-key", A)).unwrap());
    let left = || caller.standing(now).prompt_tokens.unwrap().left;
    let mut request = caller.clone().enter(now).unwrap();
    assert!(caller.clone().enter(now).is_err());
    request.charge(50, now).unwrap();
    assert!(request.charge(61, now).is_err());
    assert_eq!(left(), 60);
    request.charge(50, now).unwrap();
    assert_eq!(left(), 10);
    drop(request);
    assert!(left() >= 60);
    let mut request = caller.clone().enter(now).unwrap();
    request.charge(50, now).unwrap();
    request.served(None, now);
    request.served(Some(20), now);
    drop(request);
    assert_eq!(left(), 40);
}
