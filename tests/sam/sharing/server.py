"""A server of an engine, in a thread of this process."""

import asyncio
import threading

from sam.sharing.link import serve


class Server:
    """Answers at `address` by `ask`; without it what `answer` (bytes to bytes) says, or never while that is None."""

    def __init__(self, address, answer=None, ask=None):
        self.answer = answer
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self._server = asyncio.run_coroutine_threadsafe(serve(address, ask or self._ask), self._loop).result(300)

    async def _ask(self, question):
        if self.answer is None:
            await asyncio.sleep(600)
        return self.answer(question)

    def end(self):
        """As if its process ended."""

        async def close():
            self._server.close()
            for task in (tasks := asyncio.all_tasks() - {asyncio.current_task()}):
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        asyncio.run_coroutine_threadsafe(close(), self._loop).result(300)
        self._loop.call_soon_threadsafe(self._loop.stop)
