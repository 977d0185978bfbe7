// SPDX-License-Identifier: Apache-2.0

package secure

import (
	"context"
	"crypto/sha256"
	"fmt"
	"net/http"
	"strings"
	"time"

	"github.com/go-logr/logr"
	"golang.org/x/sync/semaphore"
	"golang.org/x/sync/singleflight"
	authenticationv1 "k8s.io/api/authentication/v1"
	authorizationv1 "k8s.io/api/authorization/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/cache"
	authentication "k8s.io/client-go/kubernetes/typed/authentication/v1"
	authorization "k8s.io/client-go/kubernetes/typed/authorization/v1"
)

// These bound what a client without rights can cost, because any client can send tokens.
const (
	allowedFor    = time.Minute      // a token that loses its rights can read for as long
	refusedFor    = 10 * time.Second // a token that gets its rights waits at most as long
	keptVerdicts  = 256              // of each kind
	reviewsAtOnce = 4
	reviewTimeout = 10 * time.Second // of both reviews of a token, with the wait for their turn
)

// reviewer passes requests to next whose bearer token may use the requested path, as the API server
// says by a TokenReview and a SubjectAccessReview. A request is refused with 401 if its token is
// missing or unknown, with 403 if its user has no right, and with 500 if the API server gives no
// answer. Answers of the API server are kept for a while, failures are not.
type reviewer struct {
	next   http.Handler
	log    logr.Logger
	tokens authentication.TokenReviewInterface
	access authorization.SubjectAccessReviewInterface

	running singleflight.Group // one review for all requests with the same key
	turns   *semaphore.Weighted
	// Refusals have a cache of their own, because a client that sends many tokens must not push out
	// the verdicts about those that may read.
	allowed, refused *cache.LRUExpireCache
}

func newReviewer(
	tokens authentication.TokenReviewInterface, access authorization.SubjectAccessReviewInterface,
	next http.Handler, log logr.Logger,
) *reviewer {
	return &reviewer{
		next: next, log: log, tokens: tokens, access: access,
		turns:   semaphore.NewWeighted(reviewsAtOnce),
		allowed: cache.NewLRUExpireCache(keptVerdicts),
		refused: cache.NewLRUExpireCache(keptVerdicts),
	}
}

// verdict is the answer to a request: http.StatusOK, or the status and message that refuse it.
type verdict struct {
	status  int
	message string
}

// key stands for a token, a verb and a path. It is a hash, so that neither tokens nor long paths
// are kept. A token and a verb contain no NUL, because HTTP does not allow it.
type key [sha256.Size]byte

func (r *reviewer) ServeHTTP(w http.ResponseWriter, request *http.Request) {
	token := bearerToken(request)
	if token == "" {
		refuse(w, verdict{http.StatusUnauthorized, "A bearer token is needed, " +
			"for example of a ServiceAccount: Authorization: Bearer <token>"})
		return
	}

	given, err := r.judge(request.Context(), token, strings.ToLower(request.Method),
		request.URL.Path)
	if request.Context().Err() != nil {
		return // the client has gone
	}
	if err != nil {
		r.log.Error(err, "Refused a request, because the API server does not say whether it may "+
			"be answered; see whether the API server can be reached, and whether the "+
			"ServiceAccount has the ClusterRole system:auth-delegator", "path", request.URL.Path)
		refuse(w, verdict{http.StatusInternalServerError,
			"The API server did not say whether this token may read this; see the log"})
		return
	}

	if given.status != http.StatusOK {
		r.log.V(1).Info("Refused a request", "path", request.URL.Path, "status", given.status,
			"message", given.message)
		refuse(w, given)
		return
	}

	r.next.ServeHTTP(w, request)
}

// bearerToken returns the token of a request, or "" if it has none (RFC 6750).
func bearerToken(request *http.Request) string {
	scheme, token, _ := strings.Cut(request.Header.Get("Authorization"), " ")
	if !strings.EqualFold(scheme, "Bearer") {
		return ""
	}
	return strings.TrimSpace(token)
}

func refuse(w http.ResponseWriter, given verdict) {
	if given.status == http.StatusUnauthorized {
		w.Header().Set("WWW-Authenticate", "Bearer")
	}
	http.Error(w, given.message, given.status)
}

// judge returns the verdict about a token that wants to use a path. It fails if the API server
// gives no answer.
func (r *reviewer) judge(ctx context.Context, token, verb, path string) (verdict, error) {
	about := key(sha256.Sum256([]byte(token + "\x00" + verb + "\x00" + path)))
	for _, known := range []*cache.LRUExpireCache{r.allowed, r.refused} {
		if given, ok := known.Get(about); ok {
			return given.(verdict), nil
		}
	}

	answer := r.running.DoChan(string(about[:]), func() (any, error) {
		// Others may wait for this review too, so it does not end with the request.
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), reviewTimeout)
		defer cancel()

		given, err := r.review(ctx, token, verb, path)
		switch {
		case err != nil:
			return nil, err
		case given.status == http.StatusOK:
			r.allowed.Add(about, given, allowedFor)
		default:
			r.refused.Add(about, given, refusedFor)
		}

		return given, nil
	})

	select {
	case <-ctx.Done():
		return verdict{}, ctx.Err()
	case result := <-answer:
		if result.Err != nil {
			return verdict{}, result.Err
		}
		return result.Val.(verdict), nil
	}
}

// review asks the API server whose token it is, and whether that user may use the path.
func (r *reviewer) review(ctx context.Context, token, verb, path string) (verdict, error) {
	if err := r.turns.Acquire(ctx, 1); err != nil {
		return verdict{}, fmt.Errorf("%d other tokens are being reviewed: %w", reviewsAtOnce, err)
	}
	defer r.turns.Release(1)

	who, err := r.tokens.Create(ctx, &authenticationv1.TokenReview{
		Spec: authenticationv1.TokenReviewSpec{Token: token},
	}, metav1.CreateOptions{})
	if err != nil {
		return verdict{}, fmt.Errorf("TokenReview: %w", err)
	}

	user := who.Status.User
	if !who.Status.Authenticated || user.Username == "" {
		return verdict{http.StatusUnauthorized, "The API server does not accept this token; " +
			"see whether it is of this cluster and has not expired"}, nil
	}

	may, err := r.access.Create(ctx, &authorizationv1.SubjectAccessReview{
		Spec: authorizationv1.SubjectAccessReviewSpec{
			User: user.Username, UID: user.UID, Groups: user.Groups, Extra: extra(user.Extra),
			NonResourceAttributes: &authorizationv1.NonResourceAttributes{Path: path, Verb: verb},
		},
	}, metav1.CreateOptions{})
	if err != nil {
		return verdict{}, fmt.Errorf("SubjectAccessReview of %s: %w", user.Username, err)
	}

	if !may.Status.Allowed || may.Status.Denied {
		return verdict{http.StatusForbidden, user.Username + " may not read this; give it a " +
			"ClusterRole that has the verb get for the nonResourceURL, for example /metrics"}, nil
	}
	return verdict{status: http.StatusOK}, nil
}

// extra converts what a TokenReview says to what a SubjectAccessReview is asked.
func extra(of map[string]authenticationv1.ExtraValue) map[string]authorizationv1.ExtraValue {
	out := make(map[string]authorizationv1.ExtraValue, len(of))
	for name, values := range of {
		out[name] = authorizationv1.ExtraValue(values)
	}
	return out
}
