//! Tests of races in virtual time: who is asked when, and what the breakers learn.

use super::super::breaker::BreakerState;
use super::*;
use fletch_core::{DatasetName, Domain, Tenant};
use fletch_origin::{OriginLimits, OriginUri, Origins};
use futures::FutureExt as _;
use parking_lot::Mutex;
use std::{path::Path, sync::atomic::Ordering::Relaxed};
use tokio::time::sleep;

const MS: fn(u64) -> Duration = Duration::from_millis;

/// The answer of a home: after how many milliseconds, and what. `None` hangs.
type Answer = Option<(u64, Result<&'static str, VersionError>)>;

/// Homes with scripted answers.
struct Script {
    homes: Homes,
    tasks: TaskTracker,
    /// The home of each candidate, by its key.
    of: Vec<Arc<Home>>,
    answers: Vec<Answer>,
    /// How many candidates a race begins with. The search finds the others.
    first: usize,
    /// Who was asked, and when.
    asked: Arc<Mutex<Vec<(usize, Duration)>>>,
    probed: Arc<Mutex<Vec<usize>>>,
    begun: Instant,
}

impl Script {
    /// Returns candidates at the homes of these numbers.
    fn new(homes_of: &[usize], answers: Vec<Answer>) -> Self {
        let (homes, origins) = (
            Homes::new(MS(10_000), Arc::default()),
            Origins::new(Vec::new(), OriginLimits::default()).expect("origins"),
        );
        let dataset = DatasetName::new("d").expect("name");
        let home = |n: &usize| {
            let uri = OriginUri::local(Path::new(&format!("/home-{n}"))).expect("uri");
            let origin = origins.open(&uri).expect("origin");
            Arc::clone(
                homes
                    .with_home((&Domain::default_domain(), &Tenant::default_tenant()), &dataset, origin)
                    .home(),
            )
        };
        let of = homes_of.iter().map(home).collect();
        Script {
            homes,
            of,
            answers,
            tasks: TaskTracker::new(),
            first: 1,
            asked: Arc::default(),
            probed: Arc::default(),
            begun: Instant::now(),
        }
    }

    fn candidate(&self, key: usize) -> Candidate<usize> {
        Candidate { home: Arc::clone(&self.of[key]), key }
    }

    async fn run(&self) -> (Finish<usize, &'static str>, Duration) {
        let begun = Instant::now();
        let ready = (0..self.first).map(|key| self.candidate(key)).collect();
        let turn = ScriptedRace { script: self, given: Mutex::new(false) };
        let finish = race(&self.homes, &self.tasks, &turn, ready, begun + MS(10_000)).await;
        (finish, begun.elapsed())
    }

    fn asked(&self) -> Vec<(usize, u64)> {
        let asked = std::mem::take(&mut *self.asked.lock());
        asked.into_iter().map(|(key, at)| (key, u64::try_from(at.as_millis()).expect("short"))).collect()
    }

    fn states(&self) -> Vec<BreakerState> {
        self.of.iter().map(|home| home.state()).collect()
    }
}

/// One race over a script.
struct ScriptedRace<'a> {
    script: &'a Script,
    given: Mutex<bool>,
}

impl Choices for ScriptedRace<'_> {
    type Key = usize;
    type Value = &'static str;

    fn ask(&self, key: &usize) -> BoxFuture<'static, Result<&'static str, VersionError>> {
        self.script.asked.lock().push((*key, self.script.begun.elapsed()));
        let answer = self.script.answers[*key].clone();
        async move {
            match answer {
                Some((ms, answer)) => {
                    sleep(MS(ms)).await;
                    answer
                }
                None => std::future::pending().await,
            }
        }
        .boxed()
    }

    fn probe(&self, key: &usize) -> BoxFuture<'static, ()> {
        self.script.probed.lock().push(*key);
        let (home, hangs) = (Arc::clone(&self.script.of[*key]), self.script.answers[*key].is_none());
        async move {
            if hangs {
                std::future::pending::<()>().await;
            }
            home.report(Outcome::Answered);
        }
        .boxed()
    }

    fn more(&self, _: bool) -> BoxFuture<'_, Found<usize>> {
        let given = std::mem::replace(&mut *self.given.lock(), true);
        let keys = if given {
            self.script.of.len()..self.script.of.len()
        } else {
            self.script.first..self.script.of.len()
        };
        let candidates = keys.map(|key| self.script.candidate(key)).collect();
        async move { Found { candidates, all: true } }.boxed()
    }
}

fn down() -> Result<&'static str, VersionError> {
    let (what, why) = ("s3://down".to_owned(), "refused".to_owned());
    Err(VersionError::Origin(OriginError::Unavailable { what, why }))
}

fn gone() -> Result<&'static str, VersionError> {
    Err(VersionError::Missing("x".to_owned()))
}

#[tokio::test(start_paused = true)]
async fn a_hanging_home_costs_one_patience_and_is_then_left_alone() {
    let script = Script::new(&[0, 1], vec![None, Some((5, Ok("near")))]);
    let (finish, took) = script.run().await;
    assert_eq!((finish.won, took.as_millis()), (Some((1, "near")), 305));
    assert_eq!(script.asked(), [(0, 0), (1, 300)]);
    assert_eq!(script.states(), [BreakerState::Open, BreakerState::Closed]);
    assert_eq!(script.homes.counts().hedged.load(Relaxed), 1);
    for _ in 0..50 {
        let (finish, took) = script.run().await;
        assert_eq!((finish.won, took.as_millis()), (Some((1, "near")), 5));
    }
    assert!(script.asked().iter().all(|(key, _)| *key == 1), "the hanging home is left alone");
    assert_eq!(script.homes.counts().opened.load(Relaxed), 1, "one opening, one line in the log");
}

#[tokio::test(start_paused = true)]
async fn readers_that_wait_for_a_home_turn_away_when_its_breaker_opens() {
    let script = Script::new(&[0, 1], vec![None, Some((5, Ok("near")))]);
    // More readers than the budget has hedges.
    let all = futures::future::join_all((0..40).map(|_| script.run())).await;
    for (finish, took) in all {
        assert_eq!(finish.won.map(|w| w.1), Some("near"));
        assert!(took <= MS(310), "{took:?}");
    }
    assert!(script.homes.counts().hedged.load(Relaxed) <= 3);
}

#[tokio::test(start_paused = true)]
async fn without_a_budget_a_silent_home_fails_a_little_later() {
    let script = Script::new(&[0, 1], vec![None, Some((5, Ok("near")))]);
    while script.of[0].take_hedge() {}
    let (finish, took) = script.run().await;
    assert_eq!((finish.won, took.as_millis()), (Some((1, "near")), 755));
    assert_eq!(script.states()[0], BreakerState::Open);
}

#[tokio::test(start_paused = true)]
async fn a_slow_home_that_answers_in_its_time_is_asked_alone() {
    let script = Script::new(&[0, 1], vec![Some((280, Ok("far"))), Some((5, Ok("near")))]);
    let (finish, took) = script.run().await;
    assert_eq!((finish.won, took.as_millis()), (Some((0, "far")), 280));
    assert_eq!(script.asked(), [(0, 0)]);
    // Without another home no patience ends.
    let script = Script::new(&[0], vec![Some((9000, Ok("far")))]);
    let (finish, took) = script.run().await;
    assert_eq!((finish.won, took.as_millis()), (Some((0, "far")), 9000));
    assert_eq!(script.states(), [BreakerState::Closed]);
    // A hedge that is no faster: the first answer counts, whoever gives it.
    let script = Script::new(&[0, 1], vec![Some((400, Ok("far"))), Some((5000, Ok("near")))]);
    let (finish, took) = script.run().await;
    assert_eq!((finish.won, took.as_millis()), (Some((0, "far")), 400));
}

#[tokio::test(start_paused = true)]
async fn damage_is_no_outage() {
    let answers = vec![Some((1, gone())), Some((1, gone())), Some((1, Ok("near")))];
    let script = Script::new(&[0, 0, 1], answers);
    for _ in 0..9 {
        let (finish, took) = script.run().await;
        assert_eq!((finish.won, took.as_millis()), (Some((2, "near")), 3));
        assert_eq!(finish.failed.len(), 2);
    }
    assert_eq!(script.states(), [BreakerState::Closed; 3]);
}

#[tokio::test(start_paused = true)]
async fn after_an_outage_another_home_comes_before_another_row() {
    let answers = vec![Some((1, down())), Some((1, Ok("row"))), Some((1, Ok("near")))];
    let script = Script::new(&[0, 0, 1], answers);
    assert_eq!(script.run().await.0.won, Some((2, "near")));
    // A row of the same home is the last resort: one file of a disk may be unreadable.
    let answers = vec![Some((1, down())), Some((1, Ok("row"))), Some((1, down()))];
    let script = Script::new(&[0, 0, 1], answers);
    let (finish, _) = script.run().await;
    assert_eq!((finish.won, finish.failed.len()), (Some((1, "row")), 2));
}

#[tokio::test(start_paused = true)]
async fn when_every_home_is_silent_the_error_names_each_in_time() {
    let script = Script::new(&[0, 1], vec![None, None]);
    for _ in 0..2 {
        let (finish, took) = script.run().await;
        assert!(finish.won.is_none() && took.as_millis() == 10_000);
        let error = VersionError::of_outages(&finish.failed).expect("an outage").to_string();
        assert!(error.contains("/home-0") && error.contains("/home-1"), "{error}");
    }
    assert_eq!(script.states(), [BreakerState::Open; 2]);
    // Both have open breakers, and a reader asks both at once.
    script.asked();
    let now = u64::try_from(script.begun.elapsed().as_millis()).expect("short");
    script.run().await;
    assert_eq!(script.asked(), [(0, now), (1, now)]);
}

#[tokio::test(start_paused = true)]
async fn a_probe_beside_the_readers_brings_a_home_back() {
    let mut script = Script::new(&[0, 1], vec![None, Some((5, Ok("near")))]);
    script.run().await;
    script.answers[0] = Some((1, Ok("far")));
    sleep(MS(999)).await;
    script.run().await;
    assert!(script.probed.lock().is_empty(), "the cooldown is not over");
    sleep(MS(10)).await;
    let (finish, took) = script.run().await;
    assert_eq!((finish.won, took.as_millis()), (Some((1, "near")), 5), "no reader waits for the probe");
    assert_eq!(*script.probed.lock(), [0]);
    assert_eq!(script.run().await.0.won, Some((0, "far")));
}
