// SPDX-License-Identifier: Apache-2.0

// Package browser drives a headless Chromium for tests of pages.
package browser

import (
	"bufio"
	"context"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/opiproject/xpu-device-plugin/test/must"
)

// Page is a page in a headless Chromium, which is driven by the DevTools protocol over a pipe:
// https://chromedevtools.github.io/devtools-protocol. A message is JSON and ends with a zero byte.
type Page struct {
	t        *testing.T
	pictures string
	to       *os.File
	session  string

	mu       sync.Mutex
	last     int
	waiting  map[int]chan answer
	problems []string // errors that the page has logged
	trace    []task
	traced   chan struct{} // closed when the trace is complete
}

// answer is a message of the browser.
type answer struct {
	ID     int             `json:"id"`
	Method string          `json:"method"`
	Params json.RawMessage `json:"params"`
	Result json.RawMessage `json:"result"`
	Error  *struct {
		Message string `json:"message"`
	} `json:"error"`
}

// patience is how long the browser may take for an answer.
const patience = time.Minute

// Start starts Chromium, which ends with the test. It does not skip the test where Chromium is
// missing, because nobody would miss it. Pictures of the page go into a directory.
func Start(t *testing.T, pictures string) *Page {
	t.Helper()
	if testing.Short() {
		t.Skip("needs Chromium, which scripts/preflight test installs")
	}
	program, err := exec.LookPath("chromium")
	if err != nil {
		program, err = exec.LookPath("google-chrome")
	}
	if err != nil {
		t.Fatalf("there is no Chromium, which scripts/preflight test installs: %v", err)
	}

	orders, to, err := os.Pipe()
	must.Succeed(t, err)
	from, answers, err := os.Pipe()
	must.Succeed(t, err)

	// Root needs --no-sandbox. The page is ours.
	ctx, stop := context.WithCancel(context.Background())
	command := exec.CommandContext(ctx, program, "--headless=new", "--no-sandbox",
		"--disable-gpu", "--disable-dev-shm-usage", "--remote-debugging-pipe", "--no-first-run",
		"--disable-background-networking", "--disable-extensions", "--hide-scrollbars",
		"--user-data-dir="+t.TempDir(), "about:blank")
	command.ExtraFiles = []*os.File{orders, answers} // the browser's 3 and 4
	must.Succeed(t, command.Start())
	must.Succeed(t, orders.Close())
	must.Succeed(t, answers.Close())

	b := &Page{t: t, pictures: pictures, to: to, waiting: map[int]chan answer{}}
	read := make(chan struct{})
	go func() {
		defer close(read)
		b.read(bufio.NewReaderSize(from, 1<<20))
	}()
	t.Cleanup(func() {
		_, _ = b.try("Browser.close", nil, "")
		_ = command.Wait()
		stop()
		_ = to.Close()
		<-read
		_ = from.Close()
	})

	b.attach()
	return b
}

func (b *Page) attach() {
	var target struct {
		TargetID string `json:"targetId"`
	}
	b.into(&target, "Target.createTarget", values{"url": "about:blank"})
	var attached struct {
		SessionID string `json:"sessionId"`
	}
	b.into(&attached, "Target.attachToTarget", values{"targetId": target.TargetID, "flatten": true})
	b.session = attached.SessionID
	for _, domain := range []string{"Page", "Runtime", "Log", "Performance"} {
		b.call(domain+".enable", nil)
	}
}

// values are the parameters of a method.
type values map[string]any

// read hands answers to those who wait for them, and keeps what the page complains of.
func (b *Page) read(from *bufio.Reader) {
	for {
		text, err := from.ReadBytes(0)
		if err != nil {
			return
		}
		var a answer
		if json.Unmarshal(text[:len(text)-1], &a) != nil {
			continue
		}

		b.mu.Lock()
		isError := a.Method == "Runtime.exceptionThrown" ||
			a.Method == "Log.entryAdded" && strings.Contains(string(a.Params), `"level":"error"`) ||
			a.Method == "Runtime.consoleAPICalled" && strings.Contains(string(a.Params), `"type":"error"`)
		if isError {
			b.problems = append(b.problems, string(a.Params))
		}
		switch a.Method {
		case "Tracing.dataCollected":
			var data struct {
				Value []task `json:"value"`
			}
			if json.Unmarshal(a.Params, &data) == nil {
				b.trace = append(b.trace, data.Value...)
			}
		case "Tracing.tracingComplete":
			close(b.traced)
		}
		if wait := b.waiting[a.ID]; wait != nil && a.ID != 0 {
			wait <- a
			delete(b.waiting, a.ID)
		}
		b.mu.Unlock()
	}
}

// try calls a method, and returns its result.
func (b *Page) try(method string, params values, session string) (json.RawMessage, error) {
	wait := make(chan answer, 1)
	b.mu.Lock()
	b.last++
	message := values{"id": b.last, "method": method}
	b.waiting[b.last] = wait
	b.mu.Unlock()

	if params != nil {
		message["params"] = params
	}
	if session != "" {
		message["sessionId"] = session
	}
	text, err := json.Marshal(message)
	if err != nil {
		return nil, err
	}
	if _, err := b.to.Write(append(text, 0)); err != nil {
		return nil, err
	}

	select {
	case a := <-wait:
		if a.Error != nil {
			return nil, fmt.Errorf("%s: %s", method, a.Error.Message)
		}
		return a.Result, nil
	case <-time.After(patience):
		return nil, fmt.Errorf("%s: no answer", method)
	}
}

func (b *Page) call(method string, params values) json.RawMessage {
	b.t.Helper()
	result, err := b.try(method, params, b.session)
	must.Succeed(b.t, err)
	return result
}

func (b *Page) into(result any, method string, params values) {
	b.t.Helper()
	must.Succeed(b.t, json.Unmarshal(b.call(method, params), result))
}

// Complaints returns what the page has logged as an error since the last call.
func (b *Page) Complaints() []string {
	b.mu.Lock()
	defer b.mu.Unlock()
	all := b.problems
	b.problems = nil
	return all
}

// task is an event of a trace:
// https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
type task struct {
	Name      string         `json:"name"`
	Process   int            `json:"pid"`
	Thread    int            `json:"tid"`
	Processor float64        `json:"tdur"` // processor time in µs
	Args      map[string]any `json:"args"`
}

// LongestTask returns the longest task of the page's main thread while something is done, in ms of
// processor time. The time for which the machine had other work is not in it.
func (b *Page) LongestTask(while func()) (longest float64) {
	b.t.Helper()
	b.mu.Lock()
	b.trace, b.traced = nil, make(chan struct{})
	traced := b.traced
	b.mu.Unlock()

	b.call("Tracing.start", values{"transferMode": "ReportEvents", "traceConfig": values{
		"includedCategories": []string{"disabled-by-default-devtools.timeline", "__metadata"},
		"excludedCategories": []string{"*"}}})
	while()
	b.call("Tracing.end", nil)
	select {
	case <-traced:
	case <-time.After(patience):
		b.t.Fatal("the trace is not complete")
	}

	b.mu.Lock()
	defer b.mu.Unlock()
	mains := map[[2]int]bool{}
	for _, e := range b.trace {
		if e.Name == "thread_name" && e.Args["name"] == "CrRendererMain" {
			mains[[2]int{e.Process, e.Thread}] = true
		}
	}

	tasks := 0
	for _, e := range b.trace {
		if e.Name == "RunTask" && mains[[2]int{e.Process, e.Thread}] {
			tasks++
			longest = max(longest, e.Processor/1000)
		}
	}
	if tasks < 100 {
		b.t.Fatalf("the trace has %d tasks of the page: its format is another one", tasks)
	}
	return longest
}

// Look sets the size of the window and the colours that its user prefers: light or dark.
func (b *Page) Look(width, height int, colours string) {
	b.t.Helper()
	b.call("Emulation.setDeviceMetricsOverride", values{
		"width": width, "height": height, "deviceScaleFactor": 1, "mobile": false})
	b.call("Emulation.setEmulatedMedia", values{"features": []values{
		{"name": "prefers-color-scheme", "value": colours}}})
}

// Visit opens an address.
func (b *Page) Visit(address string) {
	b.t.Helper()
	b.call("Page.navigate", values{"url": address})
}

// Evaluate runs JavaScript in the page, and stores its value, which may be a promise.
func (b *Page) Evaluate(into any, script string) {
	b.t.Helper()
	var got struct {
		Result struct {
			Value json.RawMessage `json:"value"`
		} `json:"result"`
		Exception *struct {
			Text string `json:"text"`
		} `json:"exceptionDetails"`
	}
	b.into(&got, "Runtime.evaluate", values{
		"expression": script, "awaitPromise": true, "returnByValue": true})
	if got.Exception != nil {
		b.t.Fatalf("%s: %s", script, got.Exception.Text)
	}
	must.Succeed(b.t, json.Unmarshal(got.Result.Value, into))
}

// Is evaluates a condition.
func (b *Page) Is(script string) (yes bool) {
	b.t.Helper()
	b.Evaluate(&yes, "!!("+script+")")
	return yes
}

// Eventually waits until a condition holds in the page. A page that is not there yet has no elements.
func (b *Page) Eventually(script string) {
	b.t.Helper()
	must.Eventually(b.t, script, func() bool {
		return b.Is("(() => { try { return " + script + " } catch { return false } })()")
	})
}

// Text returns the text of the element that a selector means.
func (b *Page) Text(selector string) (text string) {
	b.t.Helper()
	b.Evaluate(&text, fmt.Sprintf("document.querySelector(%q).innerText", selector))
	return text
}

// Press presses a key, such as "Enter" or "/".
func (b *Page) Press(key string) {
	b.t.Helper()
	down := values{"type": "keyDown", "key": key}
	if len(key) == 1 {
		down["text"] = key
	}
	b.call("Input.dispatchKeyEvent", down)
	b.call("Input.dispatchKeyEvent", values{"type": "keyUp", "key": key})
}

// Screenshot keeps a picture of the window in the directory of pictures, for people to look at.
func (b *Page) Screenshot(name string) {
	b.t.Helper()
	// The picture is of the next frame.
	b.Is("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => done(true))))")
	var shot struct {
		Data string `json:"data"`
	}
	b.into(&shot, "Page.captureScreenshot", values{"format": "png"})
	picture, err := base64.StdEncoding.DecodeString(shot.Data)
	must.Succeed(b.t, err)
	must.Succeed(b.t, os.MkdirAll(b.pictures, 0o755))
	must.Succeed(b.t, os.WriteFile(filepath.Join(b.pictures, name+".png"), picture, 0o644))
}
