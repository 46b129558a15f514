use std::time::{Duration, Instant};

use proptest::prelude::*;

use super::*;

const SECOND: Duration = Duration::from_secs(1);

fn rate(per_minute: u64, burst: u64) -> Option<Rate> {
    Some(Rate { per_minute, burst })
}

#[test]
fn a_burst_passes_and_then_one_each_interval() {
    let start = Instant::now();
    let mut account = Account::new(Limits { requests: rate(60, 3), ..Limits::default() }, start);
    let mut enter_at = |after: Duration| enter(&mut [&mut account], start + after);
    (0..3).for_each(|_| enter_at(Duration::ZERO).unwrap());
    let exceeded = Exceeded { limit: Limit::Requests, allowed: 60, wait: Some(Wait::For(SECOND)) };
    assert_eq!(enter_at(Duration::ZERO), Err(exceeded));
    let half = Exceeded { wait: Some(Wait::For(SECOND / 2)), ..exceeded };
    assert_eq!(enter_at(SECOND / 2), Err(half));
    assert_eq!([enter_at(SECOND).is_ok(), enter_at(SECOND).is_ok()], [true, false]);
}

#[test]
fn a_request_at_a_time_too_many_is_let_in_when_another_leaves() {
    let start = Instant::now();
    let mut account = Account::new(Limits { concurrent: Some(1), requests: rate(1, 2), ..Limits::default() }, start);
    enter(&mut [&mut account], start).unwrap();
    for _ in 0..5 {
        let exceeded = enter(&mut [&mut account], start).unwrap_err();
        assert_eq!((exceeded.limit, exceeded.wait), (Limit::Concurrent, None));
    }
    account.leave();
    // Refused requests took nothing of the rate.
    assert!(enter(&mut [&mut account], start).is_ok());
}

#[test]
fn a_request_is_charged_to_all_its_accounts_or_to_none() {
    let start = Instant::now();
    let (mut tenant, mut key) = (
        Account::new(Limits { requests: rate(60, 5), prompt_tokens: rate(60, 100), ..Limits::default() }, start),
        Account::new(Limits { requests: rate(60, 1), prompt_tokens: rate(60, 50), ..Limits::default() }, start),
    );
    enter(&mut [&mut tenant, &mut key], start).unwrap();
    assert!(enter(&mut [&mut tenant, &mut key], start).is_err());
    let exceeded = charge(&mut [&mut tenant, &mut key], 51, start).unwrap_err();
    assert_eq!((exceeded.limit, exceeded.wait), (Limit::PromptTokens, Some(Wait::Never)));
    let standing = tenant.standing(start);
    assert_eq!((standing.requests.unwrap().left, standing.prompt_tokens.unwrap().left), (4, 100));
    assert_eq!((tenant.running(), key.running()), (1, 1));
    let both = tenant.standing(start).tighter(key.standing(start));
    assert_eq!((both.requests.unwrap().left, both.prompt_tokens.unwrap().left), (0, 50));
}

#[test]
fn tokens_are_settled_both_ways() {
    let start = Instant::now();
    let mut account = Account::new(Limits { prompt_tokens: rate(60, 100), ..Limits::default() }, start);
    let left = |account: &mut Account| account.standing(start).prompt_tokens.unwrap().left;
    charge(&mut [&mut account], 60, start).unwrap();
    account.settle(60, 10, start);
    assert_eq!(left(&mut account), 90);
    charge(&mut [&mut account], 90, start).unwrap();
    account.settle(90, 150, start);
    assert_eq!(left(&mut account), 0);
    // 60 in debt: a unit is there after 61 s.
    let exceeded = charge(&mut [&mut account], 1, start).unwrap_err();
    assert_eq!(exceeded.wait, Some(Wait::For(61 * SECOND)));
}

#[test]
fn keys_are_found_by_their_digest_alone() {
    let digest = |n: u8| Digest([n; 32]);
    let ring = Keyring::new(&[digest(1), digest(2), digest(3)]).unwrap();
    assert_eq!([1, 2, 3, 4].map(|n| ring.find(&digest(n))), [Some(0), Some(1), Some(2), None]);
    let mut near = digest(2);
    near.0[31] ^= 1;
    assert_eq!(ring.find(&near), None);
    assert_eq!(Keyring::default().find(&digest(0)), None);
    let twice = Keyring::new(&[digest(1), digest(2), digest(1)]).unwrap_err();
    assert_eq!((twice.first, twice.second), (0, 2));
}

#[test]
fn digests_are_64_hex_digits() {
    assert_eq!(Digest::from_hex(&"0aF1".repeat(16)).map(|digest| digest.0[..2].to_vec()), Some(vec![0x0a, 0xf1]));
    for text in ["", "0a", &"g".repeat(64), &"é".repeat(32)] {
        assert_eq!(Digest::from_hex(text), None);
    }
}

/// What happens to an account.
#[derive(Clone, Debug)]
enum Step {
    Pass(u32),
    Enter,
    /// Of the running request at this place; the client leaves.
    Cancel(usize),
    Charge(usize, u64),
    Settle(usize, u64),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        (0_u32..5_000_000).prop_map(Step::Pass),
        Just(Step::Enter),
        (0_usize..8).prop_map(Step::Cancel),
        (0_usize..8, 1_u64..80).prop_map(|(at, tokens)| Step::Charge(at, tokens)),
        (0_usize..8, 0_u64..80).prop_map(|(at, tokens)| Step::Settle(at, tokens)),
    ]
}

proptest! {
    /// From any moment on, no more is let in than a burst and what flows in since; and what is charged in the end is what was used.
    #[test]
    fn never_more_than_burst_and_rate(
        per_minute in 1_u64..10_000, burst in 1_u64..60, concurrent in 1_u32..6, steps in prop::collection::vec(step(), 1..200),
    ) {
        let start = Instant::now();
        let limits = Limits { requests: rate(per_minute, burst), prompt_tokens: rate(per_minute, burst), concurrent: Some(concurrent) };
        let mut account = Account::new(limits, start);
        let mut now = start;
        // Charged tokens of running requests; when requests were let in.
        let (mut running, mut entered): (Vec<u64>, Vec<Instant>) = (Vec::new(), Vec::new());
        for step in steps {
            match step {
                Step::Pass(micros) => now += Duration::from_micros(micros.into()),
                Step::Enter if enter(&mut [&mut account], now).is_ok() => {
                    running.push(0);
                    entered.push(now);
                }
                Step::Cancel(at) if at < running.len() => {
                    account.settle(running.remove(at), 0, now);
                    account.leave();
                }
                Step::Charge(at, tokens) if at < running.len() && running[at] == 0 => {
                    let before = account.standing(now).prompt_tokens.unwrap().left;
                    let charged = charge(&mut [&mut account], tokens, now);
                    prop_assert_eq!(charged.is_ok(), tokens <= before);
                    if charged.is_ok() {
                        running[at] = tokens;
                    }
                }
                Step::Settle(at, used) if at < running.len() => {
                    account.settle(running.remove(at), used, now);
                    account.leave();
                }
                _ => {}
            }
            prop_assert_eq!(account.running() as usize, running.len());
            prop_assert!(account.running() <= concurrent);
        }
        for (first, since) in entered.iter().enumerate() {
            for (count, until) in entered[first..].iter().enumerate() {
                let flowed = until.duration_since(*since).as_nanos() * u128::from(per_minute) / 60_000_000_000;
                prop_assert!((count + 1) as u128 <= u128::from(burst) + flowed, "{} since {first}", count + 1);
            }
        }
        // Nothing is leaked: when all have gone and time has passed, all is there again.
        for charged in running.drain(..) {
            account.settle(charged, 0, now);
            account.leave();
        }
        let rest = account.standing(now + Duration::from_secs(60 * 60 * 24 * 365)).prompt_tokens.unwrap();
        prop_assert_eq!((account.running(), rest.left, rest.full_in), (0, burst, Duration::ZERO));
    }
}
