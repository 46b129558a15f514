use proptest::prelude::*;

use super::*;

/// Joins rows (priority, tenant, tokens) named by their place, and pops all.
#[track_caller]
fn check(rows: &[(i64, u32, u64)], expect: &[usize]) {
    let mut queue = Queue::new(100);
    for (name, &(priority, tenant, tokens)) in rows.iter().enumerate() {
        queue.join(Claim { priority, tenant, tokens, weight: 1 }, name).unwrap();
    }
    let order: Vec<_> = std::iter::from_fn(|| queue.pop()).map(|(_, name)| name).collect();
    assert_eq!(order, expect);
    assert!(queue.is_empty() && queue.lanes.is_empty());
}

#[test]
fn first_come_first_served() {
    check(&[(0, 0, 5), (0, 0, 90_000), (0, 0, 1)], &[0, 1, 2]);
}

#[test]
fn lower_priority_goes_first() {
    check(&[(5, 0, 1), (-3, 0, 1), (0, 0, 1), (-3, 0, 1)], &[1, 3, 2, 0]);
}

#[test]
fn priorities_are_cut() {
    check(&[(i64::MAX, 0, 1), (1_000, 0, 1), (i64::MIN, 0, 1), (-1_000, 0, 1)], &[2, 3, 0, 1]);
}

#[test]
fn a_priority_moves_nobody_of_another_tenant() {
    let big = QUANTUM_TOKENS;
    check(&[(0, 1, big), (0, 1, big), (-9, 2, big), (-9, 2, big)], &[0, 2, 1, 3]);
}

#[test]
fn tiny_requests_take_turns_too() {
    let turn = usize::try_from(QUANTUM_TOKENS / REQUEST_TOKENS_MIN).unwrap();
    let mut queue = Queue::new(200);
    for _ in 0..2 * turn {
        queue.join(Claim { tenant: 1, tokens: 0, ..Claim::default() }, 1).unwrap();
    }
    queue.join(Claim { tenant: 2, tokens: 10, ..Claim::default() }, 2).unwrap();
    let order: Vec<_> = std::iter::from_fn(|| queue.pop()).map(|(_, tenant)| tenant).collect();
    assert_eq!(order.iter().position(|tenant| *tenant == 2), Some(turn));
}

#[test]
fn a_tenant_takes_half_of_the_places_at_most() {
    let mut queue = Queue::new(4);
    let of = |tenant| Claim { tenant, ..Claim::default() };
    let got: Vec<_> = [1, 1, 1, 2, 2, 3].map(|tenant| queue.join(of(tenant), ()).is_ok()).into();
    assert_eq!(got, [true, true, false, true, true, false]);
    let mut open = Queue::new(4);
    assert!((0..4).all(|_| open.join(of(0), ()).is_ok()), "who is not told apart may fill it");
}

#[test]
fn tenants_take_turns_by_tokens() {
    let big = QUANTUM_TOKENS;
    // Tenant 1 sent first and most; each turn is one prompt of its size, or two of half the size.
    check(&[(0, 1, big), (0, 1, big), (0, 1, big), (0, 2, big / 2), (0, 2, big / 2), (0, 2, big)], &[0, 3, 4, 1, 5, 2]);
}

#[test]
fn a_tenant_of_twice_the_weight_takes_twice_as_much() {
    let mut queue = Queue::new(100);
    for (name, tenant) in [1, 1, 1, 1, 2, 2, 2, 2].into_iter().enumerate() {
        let claim = Claim { tenant, tokens: QUANTUM_TOKENS, priority: 0, weight: tenant };
        queue.join(claim, name).unwrap();
    }
    let order: Vec<_> = std::iter::from_fn(|| queue.pop()).map(|(_, name)| name).collect();
    assert_eq!(order, [0, 4, 5, 1, 6, 7, 2, 3]);
}

#[test]
fn a_very_long_prompt_gets_its_turn() {
    check(&[(0, 1, 10 * QUANTUM_TOKENS), (0, 2, QUANTUM_TOKENS), (0, 2, QUANTUM_TOKENS)], &[1, 2, 0]);
    check(&[(0, 1, u64::MAX / 4), (0, 2, u64::MAX / 2)], &[0, 1]);
}

#[test]
fn a_full_queue_says_so_and_a_place_can_be_left() {
    let mut queue = Queue::new(2);
    let claim = Claim::default();
    let first = queue.join(claim, 'a').unwrap();
    queue.join(claim, 'b').unwrap();
    assert_eq!(queue.join(claim, 'c'), Err('c'));
    assert_eq!((queue.leave(first), queue.leave(first)), (Some('a'), None));
    assert_eq!((queue.pop().map(|(_, name)| name), queue.pop(), queue.lanes.len()), (Some('b'), None, 0));
}

#[test]
fn a_bound_of_zero_is_none() {
    let bound = Bound { requests_max: 2, tokens_max: 0 };
    assert!(!bound.reached(1, 1 << 40) && bound.reached(2, 0) && bound.is_set());
    assert!(!Bound::default().reached(u64::MAX, u64::MAX) && !Bound::default().is_set());
}

proptest! {
    /// Nobody is lost, doubled or overtaken by a later one of its own tenant and priority, whoever leaves in between.
    #[test]
    fn everybody_leaves_once(steps in prop::collection::vec((0..4u8, -2..3i64, 0..4u32, 0..50_000u64), 0..200)) {
        let (mut queue, mut inside, mut name) = (Queue::new(20), Vec::new(), 0_u64);
        for (kind, priority, tenant, tokens) in steps {
            match kind {
                0 | 1 => match queue.join(Claim { priority, tenant, tokens, weight: 1 }, name) {
                    Ok(ticket) => inside.push((ticket, priority, tenant, name)),
                    Err(_) => {
                        let own = inside.iter().filter(|(_, _, other, _)| *other == tenant).count();
                        prop_assert!(inside.len() == 20 || (tenant > 0 && own == 10));
                    }
                },
                2 => {
                    let popped = queue.pop();
                    prop_assert_eq!(popped.is_some(), !inside.is_empty());
                    if let Some((_, popped)) = popped {
                        let at = inside.iter().position(|(.., name)| *name == popped).unwrap();
                        let (_, priority, tenant, _) = inside.remove(at);
                        let mut mine = inside.iter().filter(|(_, _, other, _)| *other == tenant);
                        prop_assert!(mine.all(|(_, other, _, name)| (*other, *name) > (priority, popped)));
                    }
                }
                _ if !inside.is_empty() => {
                    let (ticket, .., name) = inside.remove(tokens as usize % inside.len());
                    prop_assert_eq!(queue.leave(ticket), Some(name));
                }
                _ => {}
            }
            name += 1;
            prop_assert_eq!(queue.len(), inside.len());
        }
    }

    /// Two tenants that always have something waiting get equal tokens, to within a quantum and the longest prompt.
    #[test]
    fn tenants_get_equal_tokens(sizes in prop::collection::vec((1..20_000u64, 1..20_000u64), 50)) {
        let mut queue = Queue::new(1000);
        for (a, b) in &sizes {
            queue.join(Claim { tenant: 1, tokens: *a, ..Claim::default() }, (1, *a)).unwrap();
            queue.join(Claim { tenant: 2, tokens: *b, ..Claim::default() }, (2, *b)).unwrap();
        }
        let mut got = [0_u64; 3];
        let mut left = [0, 50, 50];
        while left[1] > 0 && left[2] > 0 {
            let (_, (tenant, tokens)) = queue.pop().unwrap();
            got[tenant] += tokens;
            left[tenant] -= 1;
            prop_assert!(got[1].abs_diff(got[2]) <= 2 * QUANTUM_TOKENS + 20_000, "{got:?}");
        }
    }
}
