// SPDX-License-Identifier: Apache-2.0

package secure

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/go-logr/logr"
	authenticationv1 "k8s.io/api/authentication/v1"
	authorizationv1 "k8s.io/api/authorization/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	authentication "k8s.io/client-go/kubernetes/typed/authentication/v1"
	authorization "k8s.io/client-go/kubernetes/typed/authorization/v1"
)

// oracle is an API server that says of every token what its fields say.
type oracle struct {
	who  authenticationv1.TokenReviewStatus
	may  authorizationv1.SubjectAccessReviewStatus
	err  error         // of TokenReviews
	err2 error         // of SubjectAccessReviews
	wait time.Duration // before a TokenReview is answered

	asked, running, most atomic.Int32 // TokenReviews
}

type (
	tokenReviews struct {
		authentication.TokenReviewInterface
		*oracle
	}
	accessReviews struct {
		authorization.SubjectAccessReviewInterface
		*oracle
	}
)

func (o tokenReviews) Create(
	ctx context.Context, review *authenticationv1.TokenReview, _ metav1.CreateOptions,
) (*authenticationv1.TokenReview, error) {
	o.asked.Add(1)
	o.most.Store(max(o.most.Load(), o.running.Add(1)))
	defer o.running.Add(-1)

	select {
	case <-ctx.Done():
		return nil, ctx.Err()
	case <-time.After(o.wait):
	}

	review.Status = o.who
	return review, o.err
}

func (o accessReviews) Create(
	_ context.Context, review *authorizationv1.SubjectAccessReview, _ metav1.CreateOptions,
) (*authorizationv1.SubjectAccessReview, error) {
	review.Status = o.may
	return review, o.err2
}

func (o *oracle) reviewer() *reviewer {
	next := http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.WriteHeader(http.StatusOK)
	})
	return newReviewer(tokenReviews{oracle: o}, accessReviews{oracle: o}, next, logr.Discard())
}

// allowing is an API server that lets everybody read.
func allowing() *oracle {
	o := &oracle{}
	o.who.Authenticated, o.who.User.Username = true, "prometheus"
	o.may.Allowed = true
	return o
}

func get(ctx context.Context, handler http.Handler, token string) int {
	request := httptest.NewRequestWithContext(ctx, http.MethodGet, "/metrics", nil)
	request.Header.Set("Authorization", "Bearer "+token)
	answer := httptest.NewRecorder()
	handler.ServeHTTP(answer, request)
	return answer.Code
}

// TestAnswers: only two clear answers of the API server let a request pass.
func TestAnswers(t *testing.T) {
	for name, test := range map[string]struct {
		change func(*oracle)
		want   int
	}{
		"may": {func(*oracle) {}, http.StatusOK},
		"not authenticated, with a user": {
			func(o *oracle) { o.who.Authenticated = false }, http.StatusUnauthorized,
		},
		"authenticated, without a user": {
			func(o *oracle) { o.who.User.Username = "" }, http.StatusUnauthorized,
		},
		"not allowed":        {func(o *oracle) { o.may.Allowed = false }, http.StatusForbidden},
		"allowed and denied": {func(o *oracle) { o.may.Denied = true }, http.StatusForbidden},
		"no TokenReview": {
			func(o *oracle) { o.err = errors.New("refused") }, http.StatusInternalServerError,
		},
		"no SubjectAccessReview": {
			func(o *oracle) { o.err2 = errors.New("refused") }, http.StatusInternalServerError,
		},
	} {
		o := allowing()
		test.change(o)
		if got := get(t.Context(), o.reviewer(), "token"); got != test.want {
			t.Errorf("%s: status %d, want %d", name, got, test.want)
		}
	}
}

// TestVerdictsAreKept: verdicts are kept for a while, and failures are not.
func TestVerdictsAreKept(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o := allowing()
		r := o.reviewer()
		expect := func(what string, status int, asked int32) {
			t.Helper()
			if got := get(t.Context(), r, "token"); got != status || o.asked.Load() != asked {
				t.Errorf("%s: status %d after %d questions, want %d after %d",
					what, got, o.asked.Load(), status, asked)
			}
		}

		o.err = errors.New("connection refused")
		expect("no answer", http.StatusInternalServerError, 1)
		o.err = nil
		expect("after no answer", http.StatusOK, 2)

		o.may.Allowed = false
		time.Sleep(allowedFor - time.Second)
		expect("allowed a while ago", http.StatusOK, 2)
		time.Sleep(2 * time.Second)
		expect("rights are gone", http.StatusForbidden, 3)

		o.may.Allowed = true
		expect("refused just now", http.StatusForbidden, 3)
		time.Sleep(refusedFor + time.Second)
		expect("rights are back", http.StatusOK, 4)

		// A verdict is about one path.
		request := httptest.NewRequest(http.MethodGet, "/more", nil)
		request.Header.Set("Authorization", "Bearer token")
		r.ServeHTTP(httptest.NewRecorder(), request)
		if o.asked.Load() != 5 {
			t.Error("the verdict about /metrics was used for another path")
		}
	})
}

// TestManyTokens: a client that sends many unknown tokens pushes out no verdict about another one,
// and has the API server asked a few at a time.
func TestManyTokens(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o := allowing()
		r := o.reviewer()
		if got := get(t.Context(), r, "prometheus"); got != http.StatusOK {
			t.Fatalf("status %d", got)
		}

		o.who.Authenticated, o.wait = false, time.Millisecond
		for i := range 2 * keptVerdicts {
			go get(t.Context(), r, fmt.Sprint("nonsense", i))
		}
		time.Sleep(reviewTimeout)
		synctest.Wait()

		if most := o.most.Load(); most != reviewsAtOnce {
			t.Errorf("%d reviews at once, want %d", most, reviewsAtOnce)
		}
		if kept := len(r.refused.Keys()); kept != keptVerdicts {
			t.Errorf("%d refusals are kept, want %d", kept, keptVerdicts)
		}
		if got := get(t.Context(), r, "prometheus"); got != http.StatusOK {
			t.Errorf("the token that may read has status %d", got)
		}
	})
}

// TestOneReview: requests with the same token wait for one review, which goes on when the first
// client leaves.
func TestOneReview(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o := allowing()
		o.wait = 2 * time.Second
		r := o.reviewer()

		impatient, leave := context.WithTimeout(t.Context(), time.Second)
		defer leave()
		go get(impatient, r, "token")
		synctest.Wait()

		var passed atomic.Int32
		for range 10 {
			go func() {
				if get(t.Context(), r, "token") == http.StatusOK {
					passed.Add(1)
				}
			}()
		}
		time.Sleep(o.wait)
		synctest.Wait()

		if passed.Load() != 10 || o.asked.Load() != 1 {
			t.Errorf("%d of 10 passed after %d reviews, want all after one",
				passed.Load(), o.asked.Load())
		}
	})
}

// TestNoAnswer: an API server that does not answer has requests refused in time, also those that
// wait for their turn.
func TestNoAnswer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o := allowing()
		o.wait = time.Hour
		r := o.reviewer()

		var refused atomic.Int32
		for i := range 3 * reviewsAtOnce {
			go func() {
				if get(t.Context(), r, fmt.Sprint(i)) == http.StatusInternalServerError {
					refused.Add(1)
				}
			}()
		}
		time.Sleep(reviewTimeout)
		synctest.Wait()

		if refused.Load() != 3*reviewsAtOnce {
			t.Errorf("%d of %d are refused after %s", refused.Load(), 3*reviewsAtOnce, reviewTimeout)
		}
	})
}
