use super::*;

fn print(n: u8) -> Fingerprint {
    Fingerprint([n; 32])
}

fn small(entries_max: usize) -> (Quarantine, Instant) {
    (Quarantine::new(Settings { entries_max, ttl: Duration::from_secs(10) }), Instant::now())
}

#[test]
fn the_second_death_makes_a_suspect_poison() {
    let (mut quarantine, now) = small(9);
    assert_eq!(quarantine.standing(print(1), now), Standing::Clear);
    assert_eq!(quarantine.died(print(1), now), Standing::Suspect);
    let left = Duration::from_secs(10);
    assert_eq!(quarantine.died(print(1), now), Standing::Poison { left });
    assert_eq!(quarantine.standing(print(2), now), Standing::Clear);
}

#[test]
fn an_answer_clears_a_suspect_but_not_poison() {
    let (mut quarantine, now) = small(9);
    quarantine.died(print(1), now);
    quarantine.answered(print(1));
    assert!(quarantine.is_empty());
    quarantine.died(print(1), now);
    quarantine.died(print(1), now);
    quarantine.answered(print(1));
    assert!(matches!(quarantine.standing(print(1), now), Standing::Poison { .. }));
}

#[test]
fn all_is_forgotten_in_time() {
    let (mut quarantine, now) = small(9);
    quarantine.died(print(1), now);
    let later = now + Duration::from_secs(10);
    assert_eq!(quarantine.standing(print(1), later), Standing::Clear);
    assert_eq!(quarantine.died(print(1), later), Standing::Suspect);
    quarantine.forget_old(later + Duration::from_secs(10));
    assert!(quarantine.is_empty() && quarantine.order.is_empty());
}

#[test]
fn the_oldest_goes_when_it_is_full() {
    let (mut quarantine, now) = small(2);
    for n in [1, 2, 1, 3] {
        quarantine.died(print(n), now);
    }
    assert_eq!((quarantine.len(), quarantine.standing(print(2), now)), (2, Standing::Clear));
    assert!(matches!(quarantine.standing(print(1), now), Standing::Poison { .. }));
    let (mut none, now) = small(0);
    assert_eq!((none.died(print(1), now), none.len()), (Standing::Clear, 0));
}

#[test]
fn both_orders_stay_equal_whatever_happens() {
    for seed in 0..100_u64 {
        let (mut quarantine, mut now) = small(5);
        for step in 0..500_u64 {
            let draw = xxhash_rust::xxh3::xxh3_64_with_seed(&step.to_le_bytes(), seed);
            let of = print((draw % 9) as u8);
            now += Duration::from_millis(draw >> 8 & 0x3ff);
            if draw >> 32 & 3 == 0 {
                quarantine.answered(of);
            } else {
                let before = quarantine.standing(of, now);
                let after = quarantine.died(of, now);
                assert_eq!(matches!(after, Standing::Poison { .. }), before != Standing::Clear, "seed {seed}");
            }
            assert!(quarantine.len() <= 5 && quarantine.len() == quarantine.order.len(), "seed {seed}");
            assert!(quarantine.order.iter().all(|(order, of)| quarantine.entries[of].order == *order));
        }
    }
}
