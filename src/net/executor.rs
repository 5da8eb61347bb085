//! Runs the tasks of hyper's connections in a set with one owner.

use std::future::poll_fn;
use std::pin::Pin;
use std::sync::{Arc, Weak};
use std::task::Poll;

use parking_lot::Mutex;
use tokio::task::JoinSet;

/// The tasks of one or more connections. Dropping it aborts them.
#[derive(Debug, Default)]
pub struct ConnectionTasks(Arc<Mutex<JoinSet<()>>>);

/// An executor that starts tasks in a [`ConnectionTasks`], until that is dropped. It has a weak
/// reference, because the tasks themselves own executors.
#[derive(Clone, Debug)]
pub struct Executor(Weak<Mutex<JoinSet<()>>>);

impl ConnectionTasks {
    pub fn executor(&self) -> Executor {
        Executor(Arc::downgrade(&self.0))
    }

    pub async fn all_ended(&self) {
        poll_fn(|context| {
            let mut tasks = self.0.lock();
            while let Some(_ended) = std::task::ready!(tasks.poll_join_next(context)) {}
            Poll::Ready(())
        })
        .await;
    }
}

impl Executor {
    pub fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        if let Some(tasks) = self.0.upgrade() {
            let mut tasks = tasks.lock();
            while tasks.try_join_next().is_some() {}
            tasks.spawn(task);
        }
    }
}

impl<F> hyper::rt::Executor<F> for Executor
where
    F: Future<Output: Send> + Send + 'static,
{
    fn execute(&self, future: F) {
        // Boxed, so that the task is compiled once and not for each of hyper's futures.
        let task: Pin<Box<dyn Future<Output = ()> + Send>> = Box::pin(async move {
            future.await;
        });
        self.spawn(task);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::sync::oneshot;
    use tokio::time::{Instant, sleep};

    use super::*;

    #[tokio::test]
    async fn tasks_end_with_their_owner_and_none_starts_afterwards() {
        let tasks = ConnectionTasks::default();
        let executor = tasks.executor();
        let (sender, ended) = oneshot::channel::<()>();
        executor.spawn(async move {
            std::future::pending::<()>().await;
            drop(sender);
        });
        drop(tasks);
        assert!(ended.await.is_err());
        let (sender, ended) = oneshot::channel::<()>();
        executor.spawn(async move { sender.send(()).expect("a receiver") });
        assert!(ended.await.is_err());
    }

    #[tokio::test(start_paused = true)]
    async fn the_wait_includes_tasks_that_start_during_it() {
        let tasks = ConnectionTasks::default();
        let executor = tasks.executor();
        let start = Instant::now();
        executor.clone().spawn(async move {
            sleep(Duration::from_secs(1)).await;
            executor.spawn(sleep(Duration::from_secs(1)));
        });
        tasks.all_ended().await;
        assert_eq!(start.elapsed().as_secs(), 2);
    }
}
