use super::*;

const TTL: u64 = 1_000;

fn loader(n: u32) -> Loader {
    Loader {
        id: format!("{n:032x}"),
        host: "h".to_owned(),
        pid: n,
        since_ms: u64::from(n),
        take_over: false,
        leave: false,
    }
}

/// The loaders of a job of one rank, with the requests of the tests.
#[derive(Default)]
struct Rank(RankLoaders);

impl Rank {
    fn admit(&mut self, loader: &Loader, sign: Sign, at: u64) -> Result<Admitted, Refusal> {
        self.0.admit((0, 1), Some(loader), sign, (at, TTL))
    }

    fn uses(&mut self, n: u32, at: u64) -> Result<Admitted, Refusal> {
        self.admit(&loader(n), Sign::Uses, at)
    }
}

fn by(n: u32) -> Arc<Loader> {
    Arc::new(loader(n))
}

fn waits(n: u32, left_ms: u64) -> Result<Admitted, Refusal> {
    Err(Refusal::Waits { by: by(n), left: Duration::from_millis(left_ms) })
}

fn took_over(n: u32) -> Result<Admitted, Refusal> {
    Ok(Admitted::TookOver { from: by(n) })
}

#[test]
fn a_second_process_is_refused_when_the_first_shows_life() {
    for sign in [Sign::Uses, Sign::Renews] {
        let mut rank = Rank::default();
        assert_eq!(rank.uses(1, 0), Ok(Admitted::Goes));
        assert_eq!(rank.uses(2, 500), waits(1, 1_000));
        assert_eq!(rank.uses(2, 900), waits(1, 600));
        assert_eq!(rank.admit(&loader(1), sign, 1_400), Ok(Admitted::Goes));
        assert_eq!(rank.uses(2, 1_450), Err(Refusal::InUse { by: by(1) }), "{sign:?}");
        assert_eq!(rank.uses(2, 1_460), Err(Refusal::InUse { by: by(1) }), "and its other workers");
        assert_eq!(rank.uses(1, 1_500), Ok(Admitted::Goes));
        // A third one after the refused one has a chance of its own.
        assert_eq!(rank.uses(3, 1_600), waits(1, 1_000));
    }
}

#[test]
fn a_silent_process_is_replaced_and_then_refused() {
    let mut rank = Rank::default();
    rank.uses(1, 0).expect("first");
    assert_eq!(rank.uses(2, 100), waits(1, 1_000));
    assert_eq!(rank.uses(2, 1_099), waits(1, 1));
    assert_eq!(rank.uses(2, 1_100), took_over(1));
    assert_eq!(rank.uses(1, 1_101), Err(Refusal::Taken { by: by(2) }));
    let insists = Loader { take_over: true, ..loader(1) };
    assert_eq!(rank.admit(&insists, Sign::Uses, 1_102), Err(Refusal::Taken { by: by(2) }), "never back");
    assert_eq!(rank.uses(2, 1_103), Ok(Admitted::Goes));
}

#[test]
fn a_process_that_was_silent_for_long_is_replaced_at_once() {
    let mut rank = Rank::default();
    rank.uses(1, 0).expect("first");
    assert_eq!(rank.uses(2, 1_500), waits(1, 500), "silent for twice the time in all");
    assert_eq!(rank.uses(2, 2_000), took_over(1));
    assert_eq!(rank.uses(3, 4_000), took_over(2));
    assert_eq!(rank.uses(1, 4_001), Err(Refusal::Taken { by: by(2) }), "it is remembered who took over");
}

#[test]
fn what_only_gives_back_is_no_life() {
    let mut rank = Rank::default();
    rank.uses(1, 0).expect("first");
    assert_eq!(rank.uses(2, 100), waits(1, 1_000));
    assert_eq!(rank.admit(&loader(1), Sign::None, 500), Ok(Admitted::Goes));
    assert_eq!(rank.uses(2, 1_100), took_over(1));
    // The farewell of a stranger takes no place.
    assert_eq!(rank.admit(&loader(7), Sign::None, 1_200), Ok(Admitted::Goes));
    assert!(!rank.0.leave(0, &loader(7).id));
    assert_eq!(rank.0.view(1_200).ranks[0].waiting, None);
}

#[test]
fn the_flag_the_farewell_and_the_same_process_need_no_wait() {
    let mut rank = Rank::default();
    rank.uses(1, 0).expect("first");
    let insists = Loader { take_over: true, ..loader(2) };
    assert_eq!(rank.admit(&insists, Sign::Uses, 1), took_over(1));
    assert_eq!(rank.admit(&insists, Sign::Uses, 2), Ok(Admitted::Goes), "each request has the flag");
    assert!(rank.0.leave(0, &loader(2).id));
    assert_eq!(rank.admit(&loader(2), Sign::Renews, 3), Ok(Admitted::Goes), "a late renewal");
    assert_eq!(rank.uses(3, 4), took_over(2));
    let again = Loader { id: loader(9).id, ..loader(3) };
    assert_eq!(rank.admit(&again, Sign::Uses, 5), took_over(3), "the same process made another loader");
    // A loader that asks again after its farewell stays.
    assert!(rank.0.leave(0, &again.id));
    assert_eq!(rank.admit(&again, Sign::Uses, 6), Ok(Admitted::Goes));
    assert!(matches!(rank.uses(4, 7), Err(Refusal::Waits { .. })));
}

#[test]
fn a_job_that_returns_to_a_state_is_open_to_the_first_that_asks() {
    let mut rank = Rank::default();
    rank.uses(1, 0).expect("first");
    rank.0.open_all();
    assert_eq!(rank.admit(&loader(1), Sign::Renews, 1), Ok(Admitted::Goes), "a late renewal");
    assert_eq!(rank.uses(2, 2), took_over(1));
    rank.0.open_all();
    assert_eq!(rank.uses(2, 3), Ok(Admitted::Goes), "it reads on");
    assert_eq!(rank.uses(3, 4), waits(2, 1_000));
}

#[test]
fn a_third_process_waits_for_the_place_to_wait() {
    let mut rank = Rank::default();
    rank.uses(1, 0).expect("first");
    assert_eq!(rank.uses(2, 100), waits(1, 1_000));
    for n in 3..1_000 {
        assert_eq!(rank.uses(n, 101), waits(1, 1_000));
    }
    assert_eq!(rank.0.view(101).ranks[0].waiting, Some(loader(2)), "one place, whatever many ask");
    assert_eq!(rank.uses(2, 1_100), took_over(1));
    // A waiting process that was killed leaves its place.
    assert_eq!(rank.0.admit((0, 1), Some(&loader(4)), Sign::Uses, (1_200, 60_000)), waits(2, 60_000));
    assert_eq!(rank.0.admit((0, 1), Some(&loader(5)), Sign::Uses, (6_199, 60_000)), waits(2, 60_000));
    assert_eq!(rank.0.view(6_199).ranks[0].waiting, Some(loader(4)));
    assert_eq!(rank.0.admit((0, 1), Some(&loader(5)), Sign::Uses, (6_200, 60_000)), waits(2, 60_000));
    assert_eq!(rank.0.view(6_200).ranks[0].waiting, Some(loader(5)));
}

#[test]
fn clients_without_an_id_are_shown_and_not_refused() {
    let mut rank = Rank::default();
    assert_eq!(rank.0.admit((0, 1), None, Sign::Uses, (5, TTL)), Ok(Admitted::Goes));
    assert_eq!((rank.0.view(8).unnamed, rank.0.view(8).ranks[0].unnamed_ms), (1, Some(3)));
    rank.uses(1, 10).expect("the first with an id");
    assert_eq!(rank.0.admit((0, 1), None, Sign::Uses, (20, TTL)), Ok(Admitted::Goes));
    let shown = rank.0.view(30);
    assert_eq!((shown.ranks[0].loader.clone(), shown.ranks[0].silent_ms), (Some(loader(1)), Some(20)));
}

#[test]
fn what_is_remembered_is_bounded() {
    let mut all = RankLoaders::default();
    for rank in 0..600 {
        all.admit((rank, 500), Some(&loader(1)), Sign::Uses, (0, TTL)).expect("the epoch refuses it");
    }
    let view = all.view(0);
    assert_eq!((view.total, view.ranks.len()), (500, LOADERS_LISTED_MAX));
    all.admit((0, 2), Some(&loader(1)), Sign::Uses, (0, TTL)).expect("a smaller world");
    assert_eq!(all.view(0).total, 2);
    // Old replacements are forgotten: only then such a loader is like a new one.
    let mut rank = Rank::default();
    let ended = u32::try_from(REPLACED_MAX).expect("small") + 2;
    for n in 1..=ended {
        let insists = Loader { take_over: true, ..loader(n) };
        rank.admit(&insists, Sign::Uses, 0).expect("it insists");
    }
    assert!(matches!(rank.uses(1, 1), Err(Refusal::Waits { .. })));
    assert_eq!(rank.uses(2, 1), Err(Refusal::Taken { by: by(3) }));
}
