use super::*;

/// Payload = one byte that tells lives apart; decodes to nothing. 9 cannot be decoded, 7 clears, 8 has a removal that cannot be read.
fn decode(payload: &[u8]) -> Result<Batch, DecodeError> {
    match payload {
        [9] => Err(DecodeError::Truncated { at: 0 }),
        [7] => Ok(Batch { events: vec![KvEvent::Cleared], ..Batch::default() }),
        [8] => Ok(Batch { skipped: vec![Skipped::Malformed, Skipped::Removal], ..Batch::default() }),
        _ => Ok(Batch::default()),
    }
}

/// Steps, one word each: `up`, `down`, `audit`, `reset`, `end`, `fail`, `L3=1` live batch 3 with byte 1, `R3=1` the same from the last replay.
/// Answers: `ask3`, `apply`, `void`, or a count's name, `!` when complete at the end.
#[track_caller]
fn check(steps: &str, expect: &str) {
    let mut replica = Replica::new(decode);
    let (mut ask, mut seen) = (0, Vec::new());
    for step in steps.split_whitespace() {
        let batch = |text: &str| {
            let (seq, byte) = text.split_once('=').unwrap_or((text, "1"));
            (seq.parse().unwrap(), vec![byte.parse().unwrap()])
        };
        let input = match step {
            "up" => Input::Connected,
            "down" => Input::Disconnected,
            "audit" => Input::Audit,
            "reset" => Input::CacheReset,
            "end" => Input::ReplayEnd { ask },
            "fail" => Input::ReplayFailed { ask },
            "old" => Input::ReplayEnd { ask: ask - 1 },
            live if live.starts_with('L') => {
                let (seq, payload) = batch(&live[1..]);
                Input::Live { seq, payload }
            }
            replayed => {
                let (seq, payload) = batch(&replayed[1..]);
                Input::Replayed { ask, seq, payload }
            }
        };
        for action in replica.step(input) {
            seen.push(match action {
                Action::AskReplay { ask: number, from } => {
                    ask = number;
                    format!("ask{from}")
                }
                Action::Apply(_) => "apply".to_owned(),
                Action::Reset => "void".to_owned(),
                Action::Undecodable { .. } => "unreadable".to_owned(),
                Action::Count(count) => format!("{count:?}"),
            });
        }
    }
    if replica.is_complete() {
        seen.push("!".to_owned());
    }
    assert_eq!(seen.join(" "), expect);
}

#[test]
fn a_start_replays_from_zero_and_goes_on_live() {
    check("up R0 R1 end L2", "ask0 apply apply apply !");
    check("up end", "ask0 !");
    check("up L1 R0 R1 end", "ask0 apply apply Duplicate !");
}

#[test]
fn a_gap_is_filled_by_a_replay_from_the_last_batch_applied() {
    check("up R0 end L3 R0 R1 R2 R3 end", "ask0 apply Gap ask0 apply apply apply Duplicate !");
}

#[test]
fn a_reconnect_to_the_same_life_goes_on() {
    check("up R0 R1 end down up R1 R2 end", "ask0 apply apply ask1 apply !");
}

#[test]
fn a_reconnect_to_another_life_voids_everything() {
    check("up R0 R1 end down up R1=2 R0=2 R1=2 end", "ask0 apply apply ask1 Restart void ask0 apply apply !");
}

#[test]
fn an_engine_that_has_not_come_so_far_is_another_life() {
    check("up R0 R1 end down up end R0=2 end", "ask0 apply apply ask1 Restart void ask0 apply !");
}

#[test]
fn a_lower_number_with_other_bytes_is_looked_into() {
    check("up R0 R1 end L0=2 R1=2 R0=2 R1=2 end", "ask0 apply apply Suspect ask1 Restart void ask0 apply apply !");
    check("up R0 R1 end L0", "ask0 apply apply Duplicate !");
}

#[test]
fn a_replay_that_begins_too_late_means_lost_history_until_a_clear() {
    check("up R5 end", "ask0 HistoryLost void apply");
    check("up R5 end L6=7", "ask0 HistoryLost void apply apply !");
}

#[test]
fn a_replay_cut_short_is_asked_for_again() {
    check("up R0 R1 fail R1 R2 end", "ask0 apply apply ask1 apply !");
}

#[test]
fn without_a_replay_the_stream_is_taken_as_it_comes() {
    check("up fail fail L5 L6", "ask0 ask0 HistoryLost void apply apply");
    check("up fail fail L0 L1", "ask0 ask0 HistoryLost void apply apply !");
    check(
        "up fail fail L5 L7 fail fail L8",
        "ask0 ask0 HistoryLost void apply Gap ask5 ask5 HistoryLost void apply apply",
    );
}

#[test]
fn a_gap_that_no_replay_fills_is_lost() {
    check("up R0 end L2 R0 end R0 end", "ask0 apply Gap ask0 ask0 HistoryLost void apply");
}

#[test]
fn a_batch_that_cannot_be_read_voids_everything() {
    check("up R0 end L1=9 L2", "ask0 apply unreadable void apply");
    check("up R0 end L1=8 L2", "ask0 apply apply void apply");
}

#[test]
fn a_reset_call_clears_at_once_and_the_late_event_does_no_harm() {
    check("up R0 end reset R0 end L1=7", "ask0 apply apply ask0 apply apply !");
    check("up R0 end reset R0 R1=7 end", "ask0 apply apply ask0 apply !");
    check("up fail fail L5 reset fail fail L6=7", "ask0 ask0 HistoryLost void apply apply ask5 ask5 apply apply !");
}

#[test]
fn a_batch_from_before_a_reset_call_is_cleared_too() {
    check("up R0 end reset L1 R0 R1 end L2=7", "ask0 apply apply ask0 apply Duplicate apply apply !");
    check("up R0 end reset L1 fail fail", "ask0 apply apply ask0 ask0 apply apply");
}

#[test]
fn a_reset_call_during_a_replay_is_repeated_after_it() {
    check("up reset R0 end", "ask0 apply apply apply");
    check("up reset R0 end L1=7", "ask0 apply apply apply apply !");
    check("up reset R0=7 end", "ask0 apply apply !");
}

#[test]
fn answers_of_an_older_replay_and_batches_of_no_connection_are_ignored() {
    check("up L1 R0 end L5 old", "ask0 apply apply Gap ask1 Stray");
    check("L0 R0", "Stray Stray");
    check("up R18446744073709551615 end", "ask0 HistoryLost void Stray");
}

#[test]
fn an_audit_finds_what_was_lost_at_the_end_and_its_failure_proves_nothing() {
    check("up R0 end audit R0 R1 end", "ask0 apply ask0 apply !");
    check("up R0 end audit", "ask0 apply ask0 !");
    check("up R0 end audit fail fail L1", "ask0 apply ask0 ask0 apply !");
    check("up R0 end audit L2 fail fail", "ask0 apply ask0 ask0 HistoryLost void apply");
    check("up R0 end audit R0=2 R0=2 end", "ask0 apply ask0 Restart void ask0 apply !");
}

#[test]
fn what_waits_is_bounded() {
    let mut replica = Replica::new(decode);
    replica.step(Input::Connected);
    let counts = |replica: &mut Replica, seq| replica.step(Input::Live { seq, payload: vec![0; 1 << 20] });
    let refused = (1..100).filter(|&seq| !counts(&mut replica, seq).is_empty()).count();
    assert_eq!(refused, 99 - 32);
}
